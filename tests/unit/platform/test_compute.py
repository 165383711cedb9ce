"""BF16 matrix products accumulate in FP32 and round once, by whatever name Megatron-core calls them, forwards and backwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_trace.platform.compute import MATRIX_PRODUCTS, fp32_accumulate, linear
from megatron_trace.platform.cpu import MegatronOnCpu

K = 257
"""Odd and long, so that a sum kept in BF16 or rounded in parts would differ."""


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def bf16(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).bfloat16()


A, B, X3, Y3, C, C3 = ((8, K), (K, 6), (3, 8, K), (3, K, 6), (8, 6), (3, 8, 6))
PRODUCTS: dict[str, tuple[Callable[..., torch.Tensor], tuple[tuple[int, ...], ...], dict[str, Any]]] = {
    "torch.matmul": (torch.matmul, (A, B), {}),
    "Tensor.matmul": (torch.Tensor.matmul, (A, B), {}),
    "@": (lambda a, b: a @ b, (A, B), {}),
    "torch.matmul batched": (torch.matmul, (X3, B), {}),
    "torch.mm": (torch.mm, (A, B), {}),
    "Tensor.mm": (torch.Tensor.mm, (A, B), {}),
    "torch.bmm": (torch.bmm, (X3, Y3), {}),
    "Tensor.bmm": (torch.Tensor.bmm, (X3, Y3), {}),
    "torch.addmm": (torch.addmm, (C, A, B), {"beta": 0.5, "alpha": 2.0}),
    "torch.baddbmm": (torch.baddbmm, (C3, X3, Y3), {"beta": 0.0, "alpha": 0.25}),
    "F.linear": (F.linear, (A, (6, K)), {}),
    "F.linear with bias": (F.linear, (A, (6, K), (6,)), {}),
}


def exact(function: Callable[..., torch.Tensor], tensors: list[torch.Tensor], settings: dict[str, Any]) -> torch.Tensor:
    return function(*(t.double() for t in tensors), **settings)


@pytest.mark.parametrize("name", list(PRODUCTS))
def test_the_result_is_the_fp32_product_rounded_once(name: str) -> None:
    function, shapes, settings = PRODUCTS[name]
    tensors = [bf16(*shape) for shape in shapes]
    with MegatronOnCpu():
        out = function(*tensors, **settings)
    in_fp32 = function(*(t.float() for t in tensors), **settings)
    assert out.dtype is torch.bfloat16 and torch.equal(out, in_fp32.bfloat16())
    # an oracle without FP32 products: half a BF16 step and the FP32 sum's own error are all it may be off
    true = exact(function, tensors, settings)
    assert ((out.double() - true).abs() <= true.abs() * 2**-8 + 1e-4).all()


@pytest.mark.parametrize("name", list(PRODUCTS))
def test_gradients_too_are_fp32_products_rounded_once(name: str) -> None:
    function, shapes, settings = PRODUCTS[name]
    tensors = [bf16(*shape).requires_grad_() for shape in shapes]
    wide = [t.detach().float().requires_grad_() for t in tensors]
    with MegatronOnCpu():
        out = function(*tensors, **settings)
        upstream = bf16(*out.shape)
        out.backward(upstream)
    function(*wide, **settings).backward(upstream.float())
    for narrow, reference in zip(tensors, wide, strict=True):
        assert narrow.grad.dtype is torch.bfloat16 and torch.equal(narrow.grad, reference.grad.bfloat16())


def test_other_dtypes_and_functions_are_left_alone() -> None:
    a, b = torch.randn(8, K), torch.randn(K, 6)
    assert fp32_accumulate(torch.mm, (a, b), {}) is None
    assert fp32_accumulate(torch.mm, (bf16(*A), bf16(*B)), {"out": bf16(*C)}) is None
    with MegatronOnCpu():
        assert torch.equal(torch.mm(a, b), a @ b) and torch.mm(a, b).dtype is torch.float32
        assert (bf16(2, 2) + bf16(2, 2)).dtype is torch.bfloat16


@pytest.mark.parametrize(
    ("x", "w"), [(torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)]
)
def test_the_engine_s_linear_is_the_same_arithmetic(x: torch.dtype, w: torch.dtype) -> None:
    a, weight = bf16(5, K).to(x), bf16(6, K).to(w)
    out = linear(a, weight)
    assert out.dtype is x and torch.equal(out, (a.float() @ weight.float().T).to(x))


def test_devices_called_cuda_are_the_cpu_inside_the_context() -> None:
    with MegatronOnCpu():
        assert torch.zeros(2, device="cuda").device.type == "cpu"
        assert torch.empty(2, device=torch.device("cuda", 0)).device.type == "cpu"
        assert torch.ones(2).to("cuda").device.type == "cpu"
        assert torch.ones(2).to("cuda", torch.float64).dtype is torch.float64


NATIVE_PRODUCTS = {torch.ops.aten.mm, torch.ops.aten.bmm, torch.ops.aten.addmm, torch.ops.aten.baddbmm, torch.ops.aten.linear}
OTHER_PRODUCTS = {torch.ops.aten.mv, torch.ops.aten.dot, torch.ops.aten.addmv, torch.ops.aten.addbmm}


class WatchProducts(TorchDispatchMode):
    """Below autograd and every override: the kernels that really run."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in NATIVE_PRODUCTS | OTHER_PRODUCTS or "scaled_dot_product" in str(func):
            dtype = str(next(a for a in args if isinstance(a, torch.Tensor)).dtype)
            self.dtypes[dtype] = self.dtypes.get(dtype, 0) + 1
        return func(*args, **(kwargs or {}))


def test_a_whole_bf16_training_step_runs_no_native_bf16_product(lone_process: None) -> None:
    from trainers import batches_of, rollout, run_config, samples_of, step, trainer_of

    config = run_config()
    trainer = trainer_of(config)
    batches = batches_of(config, samples_of(rollout(config)))
    with WatchProducts() as watch:
        done = step(trainer, batches, denominator=50.0)
    assert done.result.applied and set(watch.dtypes) == {"torch.float32"}
    # forward, dgrad, wgrad of 2 projections and 2 core products of attention, router, 4 experts x 2: per layer and micro-batch
    assert watch.dtypes["torch.float32"] >= len(batches) * 3 * 3 * (2 + 2 + 1 + 8)


def test_gradients_of_megatron_s_linear_layers_are_fp32_products_rounded_once(lone_process: None) -> None:
    """Their backward is a function of its own, which autograd runs without the caller's modes."""
    from megatron.core.tensor_parallel.layers import linear_with_grad_accumulation_and_async_allreduce as mcore_linear
    from trainers import run_config, trainer_of

    trainer_of(run_config())  # makes the groups the function asks for
    x, weight, upstream = bf16(9, 1, K).requires_grad_(), bf16(12, K).requires_grad_(), bf16(9, 1, 12)
    with MegatronOnCpu():
        out = mcore_linear(
            input=x,
            weight=weight,
            bias=None,
            gradient_accumulation_fusion=False,
            allreduce_dgrad=False,
            sequence_parallel=False,
        )
        out.backward(upstream)
    a, w, g = x.detach().float(), weight.detach().float(), upstream.float()
    assert torch.equal(out, (a @ w.T).bfloat16())
    assert torch.equal(x.grad, (g @ w).bfloat16())
    assert torch.equal(weight.grad, (g[:, 0].T @ a[:, 0]).bfloat16())


def test_the_table_names_functions_that_exist_once() -> None:
    assert {torch.matmul, torch.bmm, torch.baddbmm, F.linear} <= MATRIX_PRODUCTS
