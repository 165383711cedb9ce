"""Slow, value-by-value NVFP4 built from exact fractions and numpy float32 scalars; shares no code with the package.

Grids are enumerated and searched for the nearest entry, ties to the even code, so no bit trick of the code under test recurs
here.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np

F32 = np.float32
FLT_MAX = np.finfo(np.float32).max
E2M1 = [Fraction(n, 2) for n in (0, 1, 2, 3, 4, 6, 8, 12)]


def e4m3_value(byte: int) -> Fraction:
    """Exact value of a non-NaN E4M3 byte with sign bit 0."""
    exponent, mantissa = byte >> 3, byte & 7
    if exponent == 0:
        return Fraction(mantissa, 8) * Fraction(1, 64)
    return (1 + Fraction(mantissa, 8)) * Fraction(2) ** (exponent - 7)


E4M3 = [e4m3_value(b) for b in range(127)]  # 0 .. 448; byte 127 is NaN


def nearest_even(grid: list[Fraction], value: Fraction) -> int:
    """Index of the entry of an ascending grid nearest to value >= 0, ties to the even index; beyond the end: the end."""
    best = min(range(len(grid)), key=lambda i: (abs(grid[i] - value), i % 2))
    return best


def e2m1_code(z: np.float32) -> int:
    """Code 0..15 of a float32; NaN is 0; -0.0 is 0; a negative value that rounds to 0 keeps its sign."""
    if np.isnan(z):
        return 0
    magnitude = Fraction(6) if np.isinf(z) else abs(Fraction(float(z)))
    return nearest_even(E2M1, magnitude) | (8 if z < 0 else 0)


def e2m1_float(code: int) -> np.float32:
    value = F32(float(E2M1[code & 7]))
    return -value if code & 8 else value


def e4m3_byte(value: np.float32) -> int:
    """Byte of a float32 clamped to +-448 first; NaN is 0x7F."""
    if np.isnan(value):
        return 0x7F
    return nearest_even(E4M3, min(abs(Fraction(float(min(value, FLT_MAX)))), Fraction(448)))


def e4m3_float(byte: int) -> np.float32:
    return F32("nan") if byte == 127 else F32(float(E4M3[byte]))


def encode_scale(amax: np.float32, m: int = 448) -> np.float32:
    with np.errstate(all="ignore"):
        s = F32(6 * m) / F32(amax)
    s = s if np.isnan(s) else min(s, FLT_MAX)
    return F32(1) if s == 0 else s


def z_of(x: np.float32, scale: np.float32, s: np.float32) -> np.float32:
    with np.errstate(all="ignore"):
        inverse = F32(1) / (scale * (F32(1) / s))
        inverse = inverse if np.isnan(inverse) else min(inverse, FLT_MAX)
        z = F32(x) * inverse
    return z if np.isnan(z) else F32(min(max(z, F32(-6)), F32(6)))


def quantize_block(block: np.ndarray, amax: np.float32) -> tuple[list[int], int]:
    """Codes and scale byte of one block of 16 float32 values under global amax."""
    s = encode_scale(amax)
    vmax = F32(np.max(np.abs(block)))
    with np.errstate(all="ignore"):
        byte = e4m3_byte(vmax * (s * (F32(1) / F32(6))))
    return [e2m1_code(z_of(v, e4m3_float(byte), s)) for v in block], byte


def dequantize_value(code: int, byte: int, amax: np.float32, m: int = 448) -> np.float32:
    with np.errstate(all="ignore"):
        return (e2m1_float(code) * e4m3_float(byte)) * (F32(amax) * (F32(1) / F32(6 * m)))


def quantize(x: np.ndarray, scope: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes [R, K], scale bytes [R, K/16], dequantised float32 [R, K] of a float32 matrix; scope 'tensor' or 'row'."""
    codes = np.zeros(x.shape, np.uint8)
    scales = np.zeros((x.shape[0], x.shape[1] // 16), np.uint8)
    values = np.zeros(x.shape, np.float32)
    for r, row in enumerate(x):
        amax = F32(np.max(np.abs(row))) if scope == "row" else F32(np.max(np.abs(x)))
        for b in range(scales.shape[1]):
            block_codes, byte = quantize_block(row[16 * b : 16 * b + 16], amax)
            codes[r, 16 * b : 16 * b + 16], scales[r, b] = block_codes, byte
            values[r, 16 * b : 16 * b + 16] = [dequantize_value(c, byte, amax) for c in block_codes]
    return codes, scales, values


def bracket(z: np.float32) -> tuple[float, float]:
    """Neighbouring signed grid values of z in [-6, 6]."""
    grid = sorted({float(v) for v in E2M1} | {-float(v) for v in E2M1})
    return max(g for g in grid if g <= z), min(g for g in grid if g >= z)


def guided_full(z: np.float32, q_roll: float) -> float:
    low, high = bracket(z)
    return low if abs(low - q_roll) <= abs(high - q_roll) else high


def guided_compact(z: np.float32, bit: int) -> float:
    low, high = bracket(z)
    return low if E2M1.index(Fraction(abs(low))) % 2 == bit else high
