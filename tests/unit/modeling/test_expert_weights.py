"""Expert weights: quantised once per version, from BF16-rounded values, and the same bytes in forward and refit."""

from __future__ import annotations

import pytest
import torch
from tiny import quantized_bundle, random_weights
from trainers import KV_AMAX, batches_of, rollout, run_config, samples_of, step, trainer_of

from megatron_trace.guidance import frames
from megatron_trace.guidance.frames import GuidanceFrame, Rounding
from megatron_trace.modeling import expert_weights
from megatron_trace.modeling.build import moe_layers
from megatron_trace.modeling.expert_weights import QuantizedExpertWeight
from megatron_trace.numerics import nvfp4
from megatron_trace.numerics.nvfp4 import NVFP4Tensor
from megatron_trace.platform.device import megatron_context
from megatron_trace.rollout.refit_digest import digest_bundle
from megatron_trace.trainer.refit import build_bundle


def test_the_source_is_rounded_to_bf16_whatever_the_master() -> None:
    master = torch.randn(32, 64)
    of_master, of_rounded = QuantizedExpertWeight.of(master), QuantizedExpertWeight.of(master.bfloat16())
    plain = nvfp4.quantize(master.bfloat16(), scale_scope="tensor")
    for packed in (of_master.packed, of_rounded.packed):
        assert torch.equal(packed.codes, plain.codes)
        assert torch.equal(packed.block_scale.view(torch.uint8), plain.block_scale.view(torch.uint8))
        assert float(packed.global_amax) == float(master.bfloat16().float().abs().max())
    assert not torch.equal(nvfp4.quantize(master, scale_scope="tensor").codes, plain.codes), "the rounding must show here"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_values_are_dequantised_to_the_compute_dtype_once(dtype: torch.dtype) -> None:
    quantized = QuantizedExpertWeight.of(torch.randn(32, 64).to(dtype))
    assert torch.equal(quantized.dequantized, quantized.packed.dequantize(dtype))
    exact = quantized.packed.dequantize(torch.float32)
    assert torch.equal(exact, exact.bfloat16().float()) is False, "dequantised values need more than BF16 has"


def test_the_gradient_of_the_values_is_the_gradient_of_the_master() -> None:
    master = torch.randn(8, 16, requires_grad=True)
    quantized = QuantizedExpertWeight.of(master)
    applied = quantized.applied_to(master)
    weight = torch.randn(8, 16)
    (applied * weight).sum().backward()
    assert torch.equal(applied, quantized.dequantized) and torch.equal(master.grad, weight)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bundle_holds_the_bytes_an_independent_quantiser_gives(dtype: str) -> None:
    config = run_config(precision={"compute_dtype": dtype})
    trainer = trainer_of(config)
    ours = build_bundle(trainer, quantized=True, contract_fingerprint="c")
    theirs = quantized_bundle(
        random_weights(config.model), config.model, dtype=getattr(torch, dtype), version=0, kv_amax=KV_AMAX, fingerprint="c"
    )
    assert ours.plain.keys() == theirs.plain.keys() and ours.quantized.keys() == theirs.quantized.keys()
    assert digest_bundle(ours) == digest_bundle(theirs)


def forward_weights(trainer) -> dict[tuple[int, int, str], torch.Tensor]:
    """Weight tensors that fc1 and fc2 of every expert really multiply with in a quantised forward."""
    seen: dict[tuple[int, int, str], torch.Tensor] = {}
    hooks = []
    for layer in moe_layers(trainer.gpt):
        for e, expert in enumerate(layer.experts.local_experts):
            for name in ("linear_fc1", "linear_fc2"):
                key = (layer.layer_number - 1, e, name)
                hook = getattr(expert, name).register_forward_pre_hook(
                    lambda module, _args, key=key: seen.__setitem__(key, module.weight.detach().clone())
                )
                hooks.append(hook)
    frames.make_current(GuidanceFrame(Rounding.NEAREST))
    with megatron_context(), torch.no_grad():
        for layer in moe_layers(trainer.gpt):
            layer(torch.randn(6, 1, trainer.config.model.hidden_size, dtype=trainer.gpt.config.params_dtype))
    frames.make_current(None)
    for hook in hooks:
        hook.remove()
    return seen


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_forward_uses_exactly_the_bytes_of_the_bundle_before_and_after_a_step(dtype: str) -> None:
    config = run_config(precision={"compute_dtype": dtype})
    trainer = trainer_of(config)
    trajectories = rollout(config)
    digests = []
    for _ in range(2):
        bundle = build_bundle(trainer, quantized=True, contract_fingerprint="c")
        digests.append(digest_bundle(bundle))
        used = forward_weights(trainer)
        assert len(used) == 2 * config.model.num_experts * config.model.num_layers
        for (layer, e, name), weight in used.items():
            stem = f"model.layers.{layer}.mlp.experts.{e}."
            parts = ["gate", "up"] if name == "linear_fc1" else ["down"]
            bytes_ = [bundle.quantized[f"{stem}{p}_proj.weight"] for p in parts]
            values = [NVFP4Tensor(b.codes, b.block_scale, b.global_amax).dequantize(getattr(torch, dtype)) for b in bytes_]
            assert torch.equal(weight, torch.cat(values)), (layer, e, name)
        step(trainer, batches_of(config, samples_of(trajectories)), denominator=50.0, learning_rate=1e-2)
    assert digests[0] != digests[1]


def test_weights_are_quantised_once_per_version(monkeypatch: pytest.MonkeyPatch) -> None:
    config = run_config()
    trainer = trainer_of(config)
    samples = samples_of(rollout(config))
    count = 0
    original = expert_weights.nvfp4.quantize

    def counting(x: torch.Tensor, **settings: object) -> NVFP4Tensor:
        nonlocal count
        count += settings["scale_scope"] == "tensor"
        return original(x, **settings)

    monkeypatch.setattr(expert_weights.nvfp4, "quantize", counting)
    matrices = 2 * config.model.num_experts * config.model.num_layers
    step(trainer, batches_of(config, samples, size=1), denominator=50.0)
    assert count == matrices and trainer.version == 1
    trainer.logprobs(batches_of(config, samples, size=2))
    build_bundle(trainer, quantized=True, contract_fingerprint="c")
    assert count == matrices
    assert not trainer.step(batches_of(config, samples), None, denominator=0.0, learning_rate=1.0).applied  # type: ignore[arg-type]
    assert count == matrices and trainer.version == 1
