"""Packed pages: 4.5 bits per value in memory, and values that are exactly those of the codec."""

from __future__ import annotations

import pytest
import torch
from tiny import engine_of, quantized_bundle, request, tiny_config

from megatron_trace.numerics import nvfp4
from megatron_trace.rollout.embedded.kv_cache import DensePages, PackedPages, copy_slots

CPU = torch.device("cpu")
AMAX = torch.tensor([[5.0], [0.7]])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_read_gives_the_codec_values_of_what_was_written(dtype: torch.dtype) -> None:
    pages = PackedPages(num_slots=40, width=48, device=CPU)
    kv = (torch.randn(6, 2, 48) * torch.tensor([[2.0], [0.3]])).to(dtype)
    kv[1] = 0
    kv[2, 0, :16] *= 1e-6  # a block whose scale underflows
    slots = torch.tensor([3, 39, 0, 17, 5, 20])
    pages.write(slots, kv, AMAX)
    back = pages.read(slots.flip(0), AMAX, dtype).flip(0)
    for part, amax in enumerate((5.0, 0.7)):
        q = nvfp4.quantize(kv[:, part], scale_scope="static", global_amax=torch.tensor(amax))
        assert torch.equal(back[:, part], q.dequantize(dtype))
    assert back[2, 0, :16].abs().max() == 0 and back[0].abs().max() > 0


def test_written_tensor_is_what_is_stored() -> None:
    pages = PackedPages(num_slots=4, width=32, device=CPU)
    stored = pages.write(torch.tensor([1]), torch.randn(1, 2, 32).bfloat16(), AMAX)
    assert pages.rows[1].tolist() == stored.codes.flatten().tolist() + stored.block_scale.view(torch.uint8).flatten().tolist()
    assert pages.rows[[0, 2, 3]].count_nonzero() == 0


def test_bytes_per_token_are_measured_from_the_tensors() -> None:
    model = tiny_config(num_layers=4, num_key_value_heads=4, head_dim=64)
    values = 4 * 2 * 4 * 64
    packed = engine_of(model, quantization="nvfp4")
    assert packed.kv_bytes_per_token * 8 / values == 4.5
    assert engine_of(model).kv_bytes_per_token * 8 / values == 16
    assert engine_of(model, dtype=torch.float32).kv_bytes_per_token * 8 / values == 32


def test_generation_fills_exactly_the_slots_of_fed_back_tokens(model, weights) -> None:
    engine = engine_of(model, quantized_bundle(weights, model))
    engine.generate([request(0, (1, 2, 3, 4, 5), max_new_tokens=6)])
    for pages in engine._pages:
        assert pages.rows.any(dim=1).sum() == 10


@pytest.mark.parametrize("kind", ["packed", "dense"])
def test_copy_slots_copies_whole_rows(kind: str) -> None:
    if kind == "packed":
        pages = PackedPages(num_slots=8, width=32, device=CPU)
        pages.rows.random_(0, 256)
    else:
        pages = DensePages(num_slots=8, width=32, dtype=torch.float32, device=CPU)
        pages.rows.normal_()
    before = pages.rows.clone()
    copy_slots(pages, torch.tensor([1, 2]), torch.tensor([6, 5]))
    assert torch.equal(pages.rows[[6, 5]], before[[1, 2]]) and torch.equal(pages.rows[:5], before[:5])
