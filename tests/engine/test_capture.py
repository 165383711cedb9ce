"""What is recorded equals what was rounded: against an independent forward, and however a row was shared or copied."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from reference import Reference
from tiny import engine_of, plain_bundle, quantized_bundle, random_weights, request, tiny_config

from megatron_trace.guidance.errors import GuidanceError
from megatron_trace.guidance.probe import require_records
from megatron_trace.guidance.segments import GuidanceSegment, narrowed
from megatron_trace.guidance.spec import GuidanceSpec, RecordLayout
from megatron_trace.numerics.nvfp4 import NVFP4Tensor
from megatron_trace.rollout.embedded.recorder import Recorder

PROMPTS = [(3, 1, 4, 1, 5), (9, 2, 6), (5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6, 4, 3)]
FULL = GuidanceSpec(bits=4, layers=(0, 1, 2))
COMPACT = GuidanceSpec(bits=1, layers=(1, 2))


def nibbles(packed: np.ndarray) -> np.ndarray:
    """Codes [n, K] of packed bytes [n, K/2], even index in the low nibble."""
    return np.stack((packed & 15, packed >> 4), axis=-1).reshape(len(packed), -1)


def parts(segment: GuidanceSegment, layer: int, site: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(codes or bits [n, K], scale bytes [n, K/16], FP32 row amax [n]) of one column, decoded by hand."""
    column = segment.layout.column(layer, site)
    rows = segment.rows[:, column.start : column.stop]
    code_bytes, rest = rows[:, : column.code_bytes], rows[:, column.code_bytes :]
    codes = nibbles(code_bytes) if segment.layout.bits == 4 else np.unpackbits(code_bytes, axis=1, bitorder="little")
    amax = rest[:, column.scale_bytes : column.scale_bytes + column.amax_bytes].copy().view("<f4").reshape(-1)
    return codes, rest[:, : column.scale_bytes], amax


@pytest.mark.parametrize("spec", [FULL, COMPACT], ids=["full", "compact"])
def test_rows_decode_to_what_an_independent_forward_rounds(model, weights, spec: GuidanceSpec) -> None:
    bundle = quantized_bundle(weights, model)
    trajectories = engine_of(model, bundle).generate([request(i, p) for i, p in enumerate(PROMPTS)], capture=spec)
    same = total = 0
    for t in trajectories:
        segment, n = t.guidance, len(t.tokens) - 1
        assert len(segment) == n and segment.valid.all() and segment.versions.tolist() == [1] * n
        assert segment.sample_id == t.sample_id and segment.contract_fingerprint == bundle.contract_fingerprint
        assert segment.layout == RecordLayout.build(spec, model)
        assert segment.static_amax == {1: {(layer, site): 8.0 for layer in spec.layers for site in "kv"}}
        reference = Reference(model, bundle, torch.bfloat16)
        reference.logits(t.tokens.tolist())
        for layer in spec.layers:
            for site in spec.sites:
                q = reference.sites[layer, site]
                codes, scales, amax = parts(segment, layer, site)
                expected = nibbles(q.codes[:n].numpy())
                agree = codes == (expected if spec.bits == 4 else expected & 1)
                same, total = same + agree.sum(), total + agree.size
                assert (scales == q.block_scale[:n].view(torch.uint8).numpy()).mean() > 0.9
                if site == "fc1_in":
                    assert (amax == q.global_amax[:n, 0].numpy()).mean() > 0.9
                else:
                    assert amax.size == 0
    # A last-bit difference in an FP32 sum may turn a BF16 rounding and, rarely, a code.
    assert same / total > 0.995


def test_row_bytes_are_placed_exactly_where_the_layout_says(model) -> None:
    spec = GuidanceSpec(bits=1, layers=(0, 2), raw_values=True)
    recorder = Recorder(model=model, num_slots=10, device=torch.device("cpu"))
    assert recorder.configure(spec, routes=False) and not recorder.configure(spec, routes=False)
    made = {}
    recorder.serve(4, {(layer, site): 8.0 for layer in range(3) for site in "kv"}, keep_rows=False)
    recorder.begin(torch.tensor([7, 2, 5]), 4)
    for layer in range(3):
        for site, width in (("fc1_in", 64), ("k", 32), ("v", 32)):
            codes = torch.randint(0, 256, (3, width // 2), dtype=torch.uint8)
            scale = torch.randint(1, 120, (3, width // 16), dtype=torch.uint8)
            amax = torch.rand(3, 1) if site == "fc1_in" else torch.tensor(8.0)
            raw = torch.randn(3, width).bfloat16()
            made[layer, site] = codes, scale, amax, raw
            recorder.site(layer, site, NVFP4Tensor(codes, scale.view(torch.float8_e4m3fn), amax), raw)
    recorder.commit()
    segment = recorder.guidance(
        torch.tensor([2, 5, 6, 7]),
        sample_id=1,
        prompt_length=1,
        contract_fingerprint="c",
    )
    assert segment.valid.tolist() == [True, True, False, True], "slot 6 was never written"
    assert segment.versions.tolist() == [4, 4, -1, 4]
    order = torch.tensor([1, 2, 0])
    for column in segment.layout:
        codes, scale, amax, raw = (x[order] if x.ndim else x for x in made[column.layer, column.site])
        got = parts(segment, column.layer, column.site)
        rows = np.array([0, 1, 3])
        assert (got[0][rows] == (nibbles(codes.numpy()) & 1)).all() and (got[1][rows] == scale.numpy()).all()
        if column.site == "fc1_in":
            assert (got[2][rows] == amax[:, 0].numpy()).all()
        kept = segment.rows[rows, column.stop - column.raw_bytes : column.stop]
        assert (kept == raw.view(torch.uint8).numpy()).all()


def test_raw_values_are_those_before_rounding(model, weights) -> None:
    bundle = quantized_bundle(weights, model)
    spec = GuidanceSpec(bits=1, layers=(0,), raw_values=True)
    t = engine_of(model, bundle).generate([request(0, PROMPTS[0])], capture=spec)[0]
    reference = Reference(model, bundle, torch.bfloat16)
    reference.logits(t.tokens.tolist())
    for column in t.guidance.layout:
        raw = t.guidance.rows[:, column.stop - column.raw_bytes : column.stop].copy()
        expected = reference.raw[0, column.site][: len(t.tokens) - 1]
        assert (torch.from_numpy(raw).view(torch.bfloat16) == expected).float().mean() > 0.99


@pytest.mark.parametrize(("experts", "dtype"), [(4, np.uint8), (300, np.uint16)])
def test_routes_are_the_selected_experts_of_every_layer(experts: int, dtype: type) -> None:
    model = tiny_config(num_experts=experts, num_layers=2, moe_intermediate_size=16)
    bundle = plain_bundle(random_weights(model), dtype=torch.float32)
    engine = engine_of(model, bundle, dtype=torch.float32)
    t = engine.generate([request(0, PROMPTS[2])], capture_routes=True)[0]
    reference = Reference(model, bundle, torch.float32)
    reference.logits(t.tokens.tolist())
    n = len(t.tokens) - 1
    assert t.guidance is None and t.routes.experts.dtype == dtype and t.routes.valid.all() and len(t.routes) == n
    for layer in range(2):
        assert t.routes.experts[:, layer].tolist() == reference.routes[layer][:n].tolist()


def equal_rows(a: GuidanceSegment, b: GuidanceSegment) -> bool:
    return bool((a.rows == b.rows).all() and (a.valid == b.valid).all() and (a.versions == b.versions).all())


def test_prefix_hits_give_the_rows_of_the_shared_slots(model, weights) -> None:
    bundle = quantized_bundle(weights, model)
    warm, cold = engine_of(model, bundle), engine_of(model, bundle)
    prompt = PROMPTS[2]
    warm.generate([request(0, prompt)], capture=COMPACT, capture_routes=True)
    computed = []
    forward = warm._forward.forward
    warm._forward.forward = lambda batch, *args: (computed.append(len(batch.tokens_T)), forward(batch, *args))[1]
    hit = warm.generate([request(1, prompt)], capture=COMPACT, capture_routes=True)[0]
    miss = cold.generate([request(1, prompt)], capture=COMPACT, capture_routes=True)[0]
    assert computed[0] == 1, "17 prompt tokens, 16 of them in full cached pages"
    assert hit.tokens.tolist() == miss.tokens.tolist() and equal_rows(hit.guidance, miss.guidance)
    assert (hit.routes.experts == miss.routes.experts).all() and hit.routes.valid.all()


def test_samples_of_one_prompt_copy_its_rows(model, weights) -> None:
    engine = engine_of(model, quantized_bundle(weights, model))
    prompt = PROMPTS[2][:10]
    group = engine.generate([request(i, prompt) for i in range(3)], capture=FULL, capture_routes=True)
    assert len({tuple(t.tokens.tolist()) for t in group}) == 3
    for t in group:
        alone = engine_of(model, quantized_bundle(weights, model))
        single = alone.generate([request(t.sample_id, prompt)], capture=FULL, capture_routes=True)[0]
        assert t.tokens.tolist() == single.tokens.tolist()
        assert equal_rows(t.guidance, single.guidance) and (t.routes.experts == single.routes.experts).all()


def test_another_layout_never_hits_pages_without_its_rows(model, weights) -> None:
    engine = engine_of(model, quantized_bundle(weights, model))
    prompt = PROMPTS[2]
    expected = engine.generate([request(0, prompt)], capture=COMPACT)[0]
    for capture, routes in ((None, False), (FULL, False), (COMPACT, True), (COMPACT, False)):
        t = engine.generate([request(0, prompt)], capture=capture, capture_routes=routes)[0]
        assert t.tokens.tolist() == expected.tokens.tolist()
        assert (t.guidance is None) == (capture is None) and (t.routes is None) == (not routes)
        if capture is not None:
            assert t.guidance.valid.all()
    assert equal_rows(t.guidance, expected.guidance)


def test_prompt_rows_can_be_left_out(model, weights) -> None:
    engine = engine_of(model, quantized_bundle(weights, model))
    kept = engine.generate([request(0, PROMPTS[0])], capture=COMPACT)[0].guidance
    spec = GuidanceSpec(bits=1, layers=(1, 2), prompt_tokens=False)
    left_out = engine.generate([request(0, PROMPTS[0])], capture=spec)[0].guidance
    assert left_out.valid.tolist() == [False] * 5 + [True] * 7
    assert (left_out.rows[5:] == kept.rows[5:]).all()


def test_rows_carry_the_version_they_were_recorded_under(model, weights) -> None:
    engine = engine_of(model, quantized_bundle(weights, model, version=3, kv_amax=8.0))
    before = engine.generate([request(0, PROMPTS[2])], capture=COMPACT)[0]
    engine.update_weights(quantized_bundle(weights, model, version=5, kv_amax=9.0))
    after = engine.generate([request(0, PROMPTS[2])], capture=COMPACT)[0]
    assert set(before.guidance.versions.tolist()) == {3} and set(after.guidance.versions.tolist()) == {5}
    assert after.token_versions.tolist() == [5] * 8
    assert after.guidance.static_amax == {5: {(layer, site): 9.0 for layer in (1, 2) for site in "kv"}}


def test_capture_does_not_change_what_is_generated(model, weights) -> None:
    engine = engine_of(model, quantized_bundle(weights, model), tensor_parallel=2)
    requests = [request(i, p) for i, p in enumerate(PROMPTS)]
    plain = engine.generate(requests)
    for a, b in zip(engine.generate(requests, capture=FULL, capture_routes=True), plain, strict=True):
        assert a.tokens.tolist() == b.tokens.tolist() and a.logprobs.tolist() == b.logprobs.tolist()


def test_syndromes_are_those_of_the_codes_the_engine_rounded_to(model, weights) -> None:
    bundle = quantized_bundle(weights, model)
    spec = GuidanceSpec(bits="syndrome", layers=(0, 1, 2))
    whole = engine_of(model, bundle).generate([request(i, p) for i, p in enumerate(PROMPTS)], capture=FULL)
    coded = engine_of(model, bundle).generate([request(i, p) for i, p in enumerate(PROMPTS)], capture=spec)
    for a, b in zip(whole, coded, strict=True):
        assert (narrowed(a.guidance, b.guidance.layout).rows == b.guidance.rows).all() and b.guidance.valid.all()


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (GuidanceSpec(bits=1, layers=(1,), sites=("fc1_in", "fc2_in")), "fc2_in is rounded after dispatch"),
        (GuidanceSpec(bits=1, layers=(1,), row_scaled=frozenset({"fc1_in", "k"})), r"\['k'\] cannot be recorded otherwise"),
        (GuidanceSpec(bits=1, layers=(1,), row_scaled=frozenset()), r"\['fc1_in'\] cannot be recorded otherwise"),
    ],
)
def test_captures_that_nobody_could_use_are_refused(model, weights, spec: GuidanceSpec, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        engine_of(model, quantized_bundle(weights, model)).generate([request(0, (1,))], capture=spec)


def test_reported_logprobs_are_those_of_the_next_token(model, weights) -> None:
    """Entry i is of token prompt_length + i, not of the one before it (cases/capture.md D15)."""
    bundle = plain_bundle(weights, dtype=torch.float32)
    t = engine_of(model, bundle, dtype=torch.float32).generate([request(0, PROMPTS[0])])[0]
    logp = Reference(model, bundle, torch.float32).logits(t.tokens.tolist()).log_softmax(-1)
    at = torch.arange(t.prompt_length - 1, len(t.tokens) - 1)
    right = logp[at, torch.from_numpy(t.tokens)[at + 1]].numpy()
    shifted = logp[at + 1, torch.from_numpy(t.tokens)[at + 1]].numpy()
    np.testing.assert_allclose(t.logprobs, right, atol=1e-4)
    assert np.abs(t.logprobs - shifted).max() > 0.1


def test_the_start_up_probe_names_what_an_engine_does_not_return(model, weights) -> None:
    """cases/capture.md D07: replay switched on in the trainer, off in the engine."""
    engine = engine_of(model, quantized_bundle(weights, model))
    wanted = {"layout": RecordLayout.build(COMPACT, model), "route_layers": 3}
    t = engine.generate([request(0, PROMPTS[0])], capture=COMPACT, capture_routes=True)[0]
    rows = len(t.tokens) - 1
    require_records(t.guidance, t.routes, rows=rows, **wanted)
    bare = engine.generate([request(0, PROMPTS[0])])[0]
    for guidance, routes, asked, words in (
        (bare.guidance, t.routes, rows, "no guidance: switch capture on"),
        (t.guidance, bare.routes, rows, "no routes"),
        (t.guidance, t.routes, rows + 1, "12 rows of guidance for 13 input tokens"),
        (replace(t.guidance, valid=np.arange(rows) > 0), t.routes, rows, "guidance with 1 of 12 rows marked invalid"),
    ):
        with pytest.raises(GuidanceError, match=words):
            require_records(guidance, routes, rows=asked, **wanted)
    with pytest.raises(GuidanceError, match=r"records layers \(1, 2\) at 1 bits .* expects \(0, 1, 2\) at 4"):
        require_records(t.guidance, None, layout=RecordLayout.build(FULL, model), route_layers=None, rows=rows)
    with pytest.raises(GuidanceError, match="routes of 3 layers, the model has 4"):
        require_records(None, t.routes, layout=None, route_layers=4, rows=rows)
