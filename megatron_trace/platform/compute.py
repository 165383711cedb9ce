"""One switch for how BF16 matrix products are computed: BF16-valued tensors, FP32 accumulation, results rounded to BF16.

CPUs without AVX512-BF16 run native BF16 matmuls 9 to 19 times slower than FP32 ones, and different CPUs sum them in different
orders. Computing in FP32 on the BF16 operands and rounding the result once is what a tensor core does, and it is the same
arithmetic on every CPU. Engine and trainer both go through this file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

_REAL_LINEAR = F.linear


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``x @ weight.T`` with FP32 accumulation; the result has ``x``'s dtype.

    ``x`` [..., in] BF16 or FP32; ``weight`` [out, in] in either dtype (an FP32 copy of a BF16 weight saves the conversion).
    """
    return _REAL_LINEAR(x.float(), weight.float()).to(x.dtype)


def _upcast(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) and value.dtype is torch.bfloat16 else value


def fp32_accumulate(
    function: Callable[..., torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> torch.Tensor | None:
    """Run the matrix product ``function`` in FP32 and round to BF16; None when no argument is a BF16 CPU tensor."""
    first = next((a for a in args if isinstance(a, torch.Tensor)), None)
    if first is None or first.dtype is not torch.bfloat16 or first.device.type != "cpu" or "out" in kwargs:
        return None
    return function(*(_upcast(a) for a in args), **{k: _upcast(v) for k, v in kwargs.items()}).to(torch.bfloat16)


MATRIX_PRODUCTS: frozenset[Any] = frozenset(
    {
        torch.matmul,
        torch.Tensor.matmul,
        torch.Tensor.__matmul__,
        torch.mm,
        torch.Tensor.mm,
        torch.bmm,
        torch.Tensor.bmm,
        torch.addmm,
        torch.baddbmm,
        F.linear,
    }
)
"""Every matrix product Megatron-core's local modules call; by any other name a BF16 product would run natively."""
