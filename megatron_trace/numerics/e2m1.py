"""FP4 E2M1: sign, two exponent bits, one mantissa bit; magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6.

Three views of one number:

* value: float32 on the grid, -6 .. 6;
* code: uint8 0..15, bit 3 the sign, bits 0..2 the index of the magnitude, so bit 0 is the mantissa bit;
* ladder index: int8 -7..7, the signed index of the magnitude; neighbours on the grid differ by one, and -0 is 0.

Two codes share a byte, the even element in the low nibble (Transformer Engine's packing). Rounding is to nearest with ties to
the even code: 0.25 -> 0, 0.75 -> 1, 1.25 -> 1, 1.75 -> 2, 2.5 -> 2, 3.5 -> 4, 5 -> 4. The sign of a negative value that
rounds to zero is kept (code 8), the sign of an input -0.0 is not (``nvfp4.scaled`` drops it), both as in Transformer Engine's
reference.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

MAX = 6.0
"""Largest magnitude."""
MAGNITUDES: tuple[float, ...] = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitude of code bits 0..2."""
_EXPONENT_BITS = 0x7F800000


@lru_cache(maxsize=32)
def _table(kind: str, device: torch.device) -> Tensor:
    """Constant tables, per device: ``pair`` maps a byte to its two values (as one int64), ``code`` a code to its value."""
    values = torch.tensor([*MAGNITUDES, *(-m for m in MAGNITUDES)], dtype=torch.float32)
    if kind == "code":
        return values.to(device)
    byte = torch.arange(256)
    pairs = torch.stack((values[byte & 15], values[byte >> 4]), dim=-1).contiguous()
    return pairs.view(torch.int64).view(256).to(device)


def _lookup(kind: str, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # a table first built under inference mode could not be used in training later
        return _table(kind, device)


def steps(z: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Width of the bracket that holds float32 ``z`` in [-6, 6]: 0.5 below 2, 1 in [2, 4), 2 from 4 on; grid points are
    multiples.

    ``out``: float32 scratch of the same shape, overwritten and returned.
    """
    bits = torch.bitwise_and(z.view(torch.int32), _EXPONENT_BITS, out=None if out is None else out.view(torch.int32))
    return bits.view(torch.float32).clamp_(min=1.0).mul_(0.5)


def round_to_nearest_(z: Tensor, *, scratch: Tensor | None = None) -> Tensor:
    """In place: nearest grid value of float32 ``z`` in [-6, 6], ties to the even code. Keeps the sign of zero, and NaN."""
    step = steps(z, out=scratch)
    return z.div_(step).round_().mul_(step)


def round_to_nearest(z: Tensor) -> Tensor:
    """Nearest grid value of float32 ``z`` in [-6, 6]; ``z`` is left alone."""
    return round_to_nearest_(z.clone())


def bracket(z: Tensor) -> tuple[Tensor, Tensor]:
    """The neighbouring grid values (q-, q+), q- <= z <= q+, of float32 ``z`` in [-6, 6]; equal where z is on the grid."""
    step = steps(z)
    t = z / step
    return t.floor() * step, t.ceil_().mul_(step)


def codes_from_values(q: Tensor) -> Tensor:
    """Codes (uint8 0..15) of float32 grid values; -0.0 is code 8, NaN is code 0 as in Transformer Engine's reference."""
    nibbles = _nibbles(q)
    return (nibbles & 15).to(torch.uint8)


def pack_values(q: Tensor) -> Tensor:
    """Codes of float32 grid values [..., K], packed two to a byte: uint8 [..., K/2], even element in the low nibble."""
    pairs = _nibbles(q).view(torch.int32)  # little-endian: the even element in the low half
    high = (pairs >> 12).bitwise_and_(0xF0)
    return pairs.bitwise_and_(15).bitwise_or_(high).to(torch.uint8)


def _nibbles(q: Tensor) -> Tensor:
    """New contiguous int16 whose low four bits are the code of each grid value; the other bits are undefined.

    2**-14 is the smallest normal half, so q * 2**-14 lays exponent and mantissa bit of E2M1 (subnormal 0.5 included) at bits
    9..11; the sign is smeared down to bit 12.
    """
    half = (q * 2.0**-14).nan_to_num_(nan=0.0).half().contiguous().view(torch.int16)
    return half.bitwise_or_(half >> 3).bitwise_right_shift_(9)


def encode(z: Tensor) -> Tensor:
    """Codes (uint8 0..15, same shape) of float32 ``z``, clipped to [-6, 6] and rounded to nearest; -0.0 is code 0."""
    return codes_from_values(round_to_nearest(z.clamp(-MAX, MAX).add_(0.0)))


def decode(codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values of unpacked codes (uint8 0..15); exact in every floating dtype of 8 bits or more."""
    flat = _lookup("code", codes.device).index_select(0, codes.reshape(-1).int())
    return flat.view(codes.shape).to(dtype)


def pack(codes: Tensor) -> Tensor:
    """Pack unpacked codes uint8 [..., K] to uint8 [..., K/2]; raises ValueError when K is odd."""
    if codes.shape[-1] % 2:
        raise ValueError(f"e2m1.pack: last dimension is {codes.shape[-1]}, must be even: two codes share a byte")
    return codes[..., ::2] | (codes[..., 1::2] << 4)


def unpack(packed: Tensor) -> Tensor:
    """Unpack uint8 [..., K/2] to codes uint8 [..., K]."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def unpack_values(packed: Tensor) -> Tensor:
    """float32 values [..., K] of packed codes uint8 [..., K/2]."""
    if torch.compiler.is_compiling():
        return _values_by_arithmetic(unpack(packed))
    if packed.numel() == 0:
        return packed.new_empty((*packed.shape[:-1], packed.shape[-1] * 2), dtype=torch.float32)
    pairs = _lookup("pair", packed.device).index_select(0, packed.reshape(-1).int())
    return pairs.view(torch.float32).view(*packed.shape[:-1], packed.shape[-1] * 2)


def _values_by_arithmetic(codes: Tensor) -> Tensor:
    """float32 values of unpacked codes without a table: what a compiler can vectorise."""
    c = (codes & 7).to(torch.int32)
    exponent = (c >> 1).clamp(min=1)
    mantissa = torch.where(c >= 2, (c & 1) + 2, c).float()
    magnitude = mantissa * ((exponent + 125) << 23).view(torch.float32)  # mantissa * 2**(exponent - 2)
    return torch.where(codes >= 8, -magnitude, magnitude)


def ladder_from_codes(codes: Tensor) -> Tensor:
    """Signed ladder index (int8, -7..7) of unpacked codes; both zeros are 0."""
    magnitude = (codes & 7).to(torch.int8)
    return torch.where(codes >= 8, -magnitude, magnitude)


def ladder_from_values(q: Tensor) -> Tensor:
    """Signed ladder index (int8, -7..7) of float32 grid values."""
    return ladder_from_codes(codes_from_values(q))


def values_from_ladder(index: Tensor) -> Tensor:
    """float32 grid values of signed ladder indices."""
    magnitude = decode(index.abs().to(torch.uint8))
    return torch.where(index < 0, -magnitude, magnitude)
