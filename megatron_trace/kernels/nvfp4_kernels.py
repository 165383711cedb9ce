"""Triton device code of the NVFP4 codec; ``megatron_trace.kernels.nvfp4`` launches it. Importing this module imports Triton.

How it stays equal to ``numerics`` bit for bit and still runs at copy speed:

* A thread owns eight neighbouring values (16 bytes of BF16): tiles are [rows of eight, 8], so packing codes and bits reduces inside
  a thread, and the payload byte (1 bit a value) or word (4 bits) of a row of eight is one load.
* Rounding adds and takes away 1.5 * 2**22 * p, with p = 2**floor(log2(max(a, 1))): the float32 adder then rounds ``a`` to a multiple
  of p / 2, half to even, which is E2M1's rule. No float-integer conversion is used: those run at an eighth of the rate.
* IEEE divisions happen once per block and once per row; E4M3 and E2M1 are coded with integer arithmetic, so every architecture and
  the interpreter agree. All products keep the order of ``numerics.nvfp4``.
* Every step may be contracted to a fused multiply-add without changing a bit: the products that feed an addition are exact.

Legend: R rows of eight values in a tile, G = R / 2 blocks of sixteen.
"""

from __future__ import annotations

import triton
import triton.language as tl

FLT_MAX = tl.constexpr(3.4028234663852886e38)
SIXTH = tl.constexpr(0.16666667163372040)
DECODE_448 = tl.constexpr(0.00037202381645329297)
MAGIC = tl.constexpr(6291456.0)  # 1.5 * 2**22
EXPONENT = tl.constexpr(0x7F800000)
MAGNITUDE = tl.constexpr(0x7FFFFFFF)
SIGN = tl.constexpr(-0x80000000)


@triton.jit
def _max_nan(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _bits(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def _float(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _encode_scale(g):
    """S = min(2688 / g, FLT_MAX), 1 where that is 0."""
    s = tl.minimum(tl.div_rn(g * 0.0 + 2688.0, g), FLT_MAX, propagate_nan=tl.PropagateNan.ALL)
    return tl.where(s == 0.0, 1.0, s)


@triton.jit
def _e4m3_byte(v):
    """Byte (int32) of float32 v >= 0, clamped to 448; NaN is 0x7F."""
    v = tl.minimum(v, 448.0, propagate_nan=tl.PropagateNan.ALL)
    b = _bits(v)
    normal = ((b + 0x7FFFF + ((b >> 20) & 1)) >> 20) - 960
    subnormal = _bits(v * 512.0 + 12582912.0) - 0x4B400000
    byte = tl.where(v < 0.015625, subnormal, normal)
    return tl.where(v == v, byte, 0x7F)


@triton.jit
def _e4m3_float(byte):
    """float32 of a byte (int32, sign 0); 0x7F is NaN. Subnormal bytes pass through float32's own subnormals."""
    value = _float(byte << 20) * 1.329227995784916e36  # 2**120
    return tl.where(byte == 0x7F, float("nan"), value)


@triton.jit
def _inverse(scale, s_reciprocal):
    """min(1 / (scale * (1/S)), FLT_MAX)."""
    return tl.minimum(tl.div_rn(scale * 0.0 + 1.0, scale * s_reciprocal), FLT_MAX, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _clip(x, inverse):
    """|z| = min(|x| * inverse, 6), NaN kept."""
    return tl.minimum(tl.abs(x) * inverse, 6.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _binade(a):
    """p = 2**floor(log2(max(a, 1))), twice the width of a's bracket."""
    return _float(_bits(tl.maximum(a, 1.0)) & EXPONENT)


@triton.jit
def _signed(q, x):
    """Magnitude q with the sign of x; zeros take x's sign, but an input of -0.0 counts as +0.0."""
    return _float(_bits(q) | (_bits(x + 0.0) & SIGN))


@triton.jit
def _compact(a, bit):
    """The endpoint of a's bracket whose mantissa bit is bit 0 of ``bit``."""
    p = _binade(a)
    w = a + p * MAGIC
    r = w - p * MAGIC
    d = a - r
    other = r + 0.5 * _float((_bits(d) & SIGN) | _bits(p))
    move = (((_bits(w) ^ bit) & 1) != 0) & (d != 0.0)  # bit 0 of w is the parity of r in units of the width
    return tl.where(move, other, r)


@triton.jit
def _full(a, nibble, x):
    """The endpoint of a's bracket nearest to the rollout's value; ``nibble`` its code, x gives the sign that goes with a."""
    p = _binade(a)
    r = (a + p * MAGIC) - p * MAGIC
    d = a - r
    low = tl.where(d < 0.0, r - 0.5 * p, r)
    high = tl.where(d > 0.0, r + 0.5 * p, r)
    opposite = ((nibble << 28) ^ _bits(x + 0.0)) & SIGN
    q_roll = _float(((nibble & 7) << 22) | opposite) * 8.507059173023462e37  # 2**126; negative: on zero's other side
    return tl.maximum(low, tl.minimum(q_roll, high))


@triton.jit
def guided_kernel(
    x_ptr, payload_ptr, scale_ptr, amax_ptr, out_ptr, segment_rows, chunks, amax_rows,
    BITS: tl.constexpr, GATHER: tl.constexpr, EVEN: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Guided fake-quantise. A segment is a run of rows of eight that share one amax; GATHER: amax per row of eight instead."""
    pid = tl.program_id(0)
    segment = pid // chunks
    row_in = (pid % chunks) * R + tl.arange(0, R)
    mask = row_in < segment_rows
    base = segment.to(tl.int64) * segment_rows + (pid % chunks) * R  # scalar: the rest of the addressing fits 32 bits
    local = tl.arange(0, R)
    offset = local[:, None] * 8 + tl.arange(0, 8)[None, :]
    x_ptr += base * 8
    out_ptr += base * 8
    payload_ptr += base
    scale_ptr += base // 2
    if EVEN:
        x = tl.load(x_ptr + offset).to(tl.float32)
        byte = tl.load(scale_ptr + local // 2).to(tl.int32)
        payload = tl.load(payload_ptr + local).to(tl.int32)
    else:
        x = tl.load(x_ptr + offset, mask=mask[:, None], other=0.0).to(tl.float32)
        byte = tl.load(scale_ptr + local // 2, mask=mask, other=0).to(tl.int32)
        payload = tl.load(payload_ptr + local, mask=mask, other=0).to(tl.int32)
    if GATHER:
        g = tl.load(amax_ptr + (base + local) // amax_rows, mask=mask, other=1.0)
    else:
        g = tl.load(amax_ptr + segment)
    scale = _e4m3_float(byte)
    s_reciprocal = tl.div_rn(g * 0.0 + 1.0, _encode_scale(g))
    a = _clip(x, _inverse(scale, s_reciprocal)[:, None])
    lane = tl.arange(0, 8)[None, :]
    if BITS == 1:
        q = _compact(a, payload[:, None] >> lane)
    else:
        q = _full(a, (payload[:, None] >> (4 * lane)) & 15, x)
    factor = g * DECODE_448
    if GATHER:
        value = (_signed(q, x) * scale[:, None]) * factor[:, None]
    else:
        value = (_signed(q, x) * scale[:, None]) * factor
    if EVEN:
        tl.store(out_ptr + offset, value.to(out_ptr.dtype.element_ty))
    else:
        tl.store(out_ptr + offset, value.to(out_ptr.dtype.element_ty), mask=mask[:, None])


@triton.jit
def _pack8(nibbles):
    """int32 [R] from the low four bits of int32 [R, 8], element 0 lowest."""
    return tl.sum((nibbles & 15) << (4 * tl.arange(0, 8)[None, :]), axis=1)


@triton.jit
def _round_codes(a):
    """(nearest grid value of magnitude a, int32 whose low three bits are its code)."""
    p = _binade(a)
    # 0, 2 or 8 on top of the magic makes the low mantissa bits the code instead of the multiple of the width
    magic = p * MAGIC + tl.where(a < 2.0, 0.0, tl.where(a < 4.0, 2.0, 8.0))
    w = a + magic
    return w - magic, _bits(w)


@triton.jit
def quantize_kernel(
    x_ptr, codes_ptr, scale_ptr, bits_ptr, amax_ptr, out_ptr, segment_rows, chunks, amax_rows,
    OWN: tl.constexpr, GATHER: tl.constexpr, CODES: tl.constexpr, RECORD: tl.constexpr, VALUES: tl.constexpr,
    EVEN: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Quantise to nearest: any of codes with scales (CODES), mantissa bits (RECORD) and dequantised values (VALUES).

    OWN: the program sees a whole segment and writes its amax; else the amax is given, per segment or (GATHER) per row of eight.
    """
    pid = tl.program_id(0)
    segment = pid // chunks
    base = segment.to(tl.int64) * segment_rows + (pid % chunks) * R
    local = tl.arange(0, R)
    pair = tl.arange(0, R // 2)
    mask = (pid % chunks) * R + local < segment_rows
    pair_mask = (pid % chunks) * R + 2 * pair < segment_rows
    offset = local[:, None] * 8 + tl.arange(0, 8)[None, :]
    if EVEN:
        x = tl.load(x_ptr + base * 8 + offset).to(tl.float32)
    else:
        x = tl.load(x_ptr + base * 8 + offset, mask=mask[:, None], other=0.0).to(tl.float32)
    half = tl.reduce(tl.abs(x), 1, _max_nan)  # [R]
    block = tl.reduce(tl.reshape(half, (R // 2, 2)), 1, _max_nan)  # [G]
    if OWN:
        g = tl.reduce(block, 0, _max_nan)
        tl.store(amax_ptr + segment, g)
    elif GATHER:
        g = tl.load(amax_ptr + (base + 2 * pair) // amax_rows, mask=pair_mask, other=1.0)
    else:
        g = tl.load(amax_ptr + segment)
    s = _encode_scale(g)
    byte = _e4m3_byte(block * (s * SIXTH))
    scale_block = _e4m3_float(byte)
    inverse_block = _inverse(scale_block, tl.div_rn(g * 0.0 + 1.0, s))
    inverse = tl.reshape(tl.broadcast_to(inverse_block[:, None], (R // 2, 2)), (R,))
    scale = tl.reshape(tl.broadcast_to(scale_block[:, None], (R // 2, 2)), (R,))
    a = _clip(x, inverse[:, None])
    if CODES:
        q, code = _round_codes(a)
        alive = tl.where(scale == scale, -1, 0)  # a NaN block has codes 0
        sign = (_bits(x + 0.0) >> 28) & 8
        word = _pack8(((code & 7) | tl.where(a == a, sign, 0))) & alive
        row = tl.max_contiguous(local, 1)  # keep one row a thread: wider stores would go through shared memory
        if EVEN:
            tl.store(codes_ptr + base + row, word)
            tl.store(scale_ptr + base // 2 + tl.max_contiguous(pair, 1), byte.to(tl.uint8))
        else:
            tl.store(codes_ptr + base + row, word, mask=mask)
            tl.store(scale_ptr + base // 2 + tl.max_contiguous(pair, 1), byte.to(tl.uint8), mask=pair_mask)
        if RECORD:
            dead = tl.where(scale > 0.0, word & 0x11111111, 0)
            t = (dead | (dead >> 3)) & 0x03030303
            t = (t | (t >> 6)) & 0x000F000F
            t = (t | (t >> 12)) & 0xFF
            if EVEN:
                tl.store(bits_ptr + base + row, t.to(tl.uint8))
            else:
                tl.store(bits_ptr + base + row, t.to(tl.uint8), mask=mask)
    else:
        p = _binade(a)
        q = (a + p * MAGIC) - p * MAGIC
    if VALUES:
        value = _signed(q, x) * scale[:, None]
        if GATHER:
            factor = tl.reshape(tl.broadcast_to((g * DECODE_448)[:, None], (R // 2, 2)), (R,))
            value = value * factor[:, None]
        else:
            value = value * (g * DECODE_448)
        if EVEN:
            tl.store(out_ptr + base * 8 + offset, value.to(out_ptr.dtype.element_ty))
        else:
            tl.store(out_ptr + base * 8 + offset, value.to(out_ptr.dtype.element_ty), mask=mask[:, None])
