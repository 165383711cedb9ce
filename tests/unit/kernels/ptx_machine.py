"""Executes the straight-line PTX of ``megatron_trace.kernels.ptx`` on vectors of 32-bit registers.

Written from the PTX ISA manual; only the instructions those texts use exist, and any other raises. Rounding is done from exact
float64 results, so directed rounding and subnormals are the hardware's.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Register = NDArray[np.uint32]


def _floats(x: Register) -> NDArray[np.float32]:
    return x.view(np.float32)


def _round(exact: NDArray[np.float64], mode: str) -> Register:
    """float32 bits of exact results, rounded to nearest even (rn), to zero (rz) or up (rp)."""
    r = exact.astype(np.float32)
    if mode == "rz":
        r = np.where(np.abs(r.astype(np.float64)) > np.abs(exact), np.nextafter(r, np.float32(0)), r)
    elif mode == "rp":
        r = np.where(r.astype(np.float64) < exact, np.nextafter(r, np.float32(np.inf)), r)
    return _canonical(r)


def _canonical(x: NDArray[np.float32]) -> Register:
    return np.where(np.isnan(x), np.uint32(0x7FFFFFFF), x.view(np.uint32)).astype(np.uint32)


def _mul(mode: str) -> Callable[..., Register]:
    return lambda a, b: _round(_floats(a).astype(np.float64) * _floats(b).astype(np.float64), mode)


def _fma(a: Register, b: Register, c: Register) -> Register:
    return _round(_floats(a).astype(np.float64) * _floats(b).astype(np.float64) + _floats(c).astype(np.float64), "rn")


def _to_bf16(x: Register) -> Register:
    b = x.astype(np.uint64)
    rounded = (b + 0x7FFF + ((b >> 16) & 1)) >> 16
    return np.where(np.isnan(_floats(x)), 0x7FFF, rounded).astype(np.uint32) & np.uint32(0xFFFF)


def _halves(x: Register) -> tuple[Register, Register]:
    return (x << np.uint32(16)).astype(np.uint32), x & np.uint32(0xFFFF0000)


def _pairwise(rule: Callable[..., Register]) -> Callable[..., Register]:
    """A float32 rule applied to both BF16 halves; the float32 result is exact in the uses here, so it is rounded once."""

    def apply(*operands: Register) -> Register:
        low, high = zip(*(_halves(x) for x in operands), strict=True)
        return _to_bf16(rule(*low)) | (_to_bf16(rule(*high)) << np.uint32(16)).astype(np.uint32)

    return apply


def _max_nan(a: Register, b: Register) -> Register:
    return _canonical(np.maximum(_floats(a), _floats(b)))


def _prmt(a: Register, b: Register, selector: Register) -> Register:
    source = np.concatenate([v.view(np.uint8).reshape(-1, 4) for v in (a, b)], axis=1)
    s = int(selector[0])
    picks = [source[:, (s >> (4 * i)) & 7] for i in range(4)]
    return np.ascontiguousarray(np.stack(picks, axis=1)).view(np.uint32).reshape(-1)


def _signed(rule: Callable[..., NDArray[np.int32]]) -> Callable[..., Register]:
    return lambda a, b: rule(a.view(np.int32), b.view(np.int32)).view(np.uint32)


RULES: dict[str, Callable[..., Register]] = {
    "mov.b32": lambda a: a,
    "shl.b32": lambda a, n: a << n,
    "shr.u32": lambda a, n: a >> n,
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "xor.b32": lambda a, b: a ^ b,
    "not.b32": lambda a: ~a,
    "add.u32": lambda a, b: a + b,
    "mul.lo.u32": lambda a, b: a * b,
    "min.u32": np.minimum,
    "min.s32": _signed(np.minimum),
    "max.s32": _signed(np.maximum),
    "setp.ne.u32": lambda a, b: (a != b).astype(np.uint32),
    "prmt.b32": _prmt,
    "abs.f32": lambda a: a & np.uint32(0x7FFFFFFF),
    "abs.bf16x2": lambda a: a & np.uint32(0x7FFF7FFF),
    "add.rn.f32": lambda a, b: _round(_floats(a).astype(np.float64) + _floats(b).astype(np.float64), "rn"),
    "mul.rn.f32": _mul("rn"),
    "mul.rz.f32": _mul("rz"),
    "mul.rp.f32": _mul("rp"),
    "fma.rn.f32": _fma,
    "fma.rn.bf16x2": _pairwise(_fma),
    "min.NaN.f32": lambda a, b: _canonical(np.minimum(_floats(a), _floats(b))),
    "max.f32": lambda a, b: _canonical(np.fmax(_floats(a), _floats(b))),
    "max.NaN.f32": _max_nan,
    "max.NaN.bf16x2": _pairwise(_max_nan),
    "cvt.rn.bf16x2.f32": lambda high, low: _to_bf16(low) | (_to_bf16(high) << np.uint32(16)).astype(np.uint32),
}


def _operand(token: str, registers: dict[str, Register], lanes: int) -> Register:
    if token in registers:
        return registers[token]
    number = int(token[2:], 16) if token.startswith("0f") else int(token, 0)
    return np.full(lanes, number, dtype=np.uint32)


def run(text: str, inputs: list[Register], outputs: int) -> list[Register]:
    """The registers $0 .. $outputs-1 after ``text``, with ``inputs`` uint32 [lanes] in the registers that follow them."""
    lanes = len(inputs[0])
    registers = {f"${outputs + i}": x.astype(np.uint32) for i, x in enumerate(inputs)}
    text = re.sub(r"//[^\n]*", "", text).strip().removeprefix("{").removesuffix("}")
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        for statement in (s.strip() for s in text.split(";")):
            if not statement or statement.startswith(".reg"):
                continue
            guard, _, body = statement.rpartition("@")[2].partition(" ") if statement.startswith("@") else ("", "", statement)
            name, _, rest = body.partition(" ")
            target, *operands = (token.strip() for token in rest.split(","))
            value = RULES[name](*(_operand(token, registers, lanes) for token in operands))
            if guard:
                value = np.where(registers[guard] != 0, value, registers[target])
            registers[target] = value.astype(np.uint32)
    return [registers[f"${i}"] for i in range(outputs)]
