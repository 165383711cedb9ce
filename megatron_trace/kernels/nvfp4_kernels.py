"""Triton device code of the NVFP4 codec; ``megatron_trace.kernels.nvfp4`` launches it. Importing this module imports Triton.

How it stays equal to ``numerics`` bit for bit and still runs at copy speed:

* A thread owns eight neighbouring values (16 bytes of BF16): tiles are [rows of eight, 8], so packing codes and bits reduces
  inside a thread, and the payload byte (1 bit a value) or word (4 bits) of a row of eight is one load.
* Rounding adds and takes away 1.5 * 2**22 * p, with p = 2**floor(log2(max(a, 1))): the float32 adder then rounds ``a`` to a
  multiple of p / 2, half to even, which is E2M1's rule. No float-integer conversion is used; those run at an eighth of the
  rate.
* IEEE divisions happen once per block and once per row. All products keep the order of ``numerics.nvfp4``.
* No product may be fused with an addition by the compiler: fused, x * inverse + 0.0 keeps the sign of a product that
  underflows, and separate it does not. Fused operations are written out, and their products are exact.
* BF16 on a device with BF16 arithmetic takes the instructions of ``ptx``; the code here is for the other types and devices.

Legend: R rows of eight values in a tile, G = R / 2 blocks of sixteen.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_trace.kernels import ptx

FLT_MAX = tl.constexpr(3.4028234663852886e38)
SIXTH = tl.constexpr(0.16666667163372040)
DECODE_448 = tl.constexpr(0.00037202381645329297)
MAGIC = tl.constexpr(6291456.0)  # 1.5 * 2**22
EXPONENT = tl.constexpr(0x7F800000)
MAGNITUDE = tl.constexpr(0x7FFFFFFF)
SIGN = tl.constexpr(-0x80000000)
SCALE_SHIFT = tl.constexpr(ptx.SCALE_SHIFT)
FACTOR_SHIFT = tl.constexpr(ptx.FACTOR_SHIFT)
PTX_COMPACT = tl.constexpr(ptx.guided(1))
PTX_FULL = tl.constexpr(ptx.guided(4))
PTX_CODES = tl.constexpr(ptx.codes())
PTX_AMAX = tl.constexpr(ptx.amax())


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
def _widen(x):
    """float32 of x; BF16 by shifting its bits, because the interpreter's cast drops subnormals."""
    if x.dtype == tl.bfloat16:
        return _float(x.to(tl.uint16, bitcast=True).to(tl.int32) << 16)
    return x.to(tl.float32)


@triton.jit
def _narrow(value, out_ptr, HARDWARE: tl.constexpr):
    """float32 rounded to the output's type, half to even; without HARDWARE by hand for BF16, which the interpreter
    truncates.
    """
    if (out_ptr.dtype.element_ty == tl.bfloat16) and not HARDWARE:
        b = _bits(value)
        rounded = ((b + 0x7FFF + ((b >> 16) & 1)) >> 16) & 0xFFFF
        return tl.where(value == value, rounded, 0x7FC0).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return value.to(out_ptr.dtype.element_ty)


@triton.jit
def _encode_scale(g):
    """S = min(2688 / g, FLT_MAX), 1 where that is 0."""
    s = tl.minimum(tl.div_rn(2688.0, g), FLT_MAX, propagate_nan=tl.PropagateNan.ALL)
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
    return tl.minimum(tl.div_rn(1.0, scale * s_reciprocal), FLT_MAX, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _clip(z):
    """min(|z|, 6), NaN kept."""
    return tl.minimum(tl.abs(z), 6.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _binade(a):
    """p = 2**floor(log2(max(a, 1))), twice the width of a's bracket."""
    return _float(_bits(tl.maximum(a, 1.0)) & EXPONENT)


@triton.jit
def _signed(q, z):
    """Magnitude q with the sign of z; zeros take z's sign, but a z of -0.0 counts as +0.0."""
    return _float((_bits(q) & MAGNITUDE) | (_bits(z + 0.0) & SIGN))


@triton.jit
def _compact(a, bit):
    """The endpoint of a's bracket whose mantissa bit is bit 0 of ``bit``."""
    p = _binade(a)
    w = tl.fma(p, MAGIC, a)
    r = tl.fma(p, -MAGIC, w)
    d = a - r
    other = r + 0.5 * _float((_bits(d) & SIGN) | _bits(p))
    move = (((_bits(w) ^ bit) & 1) != 0) & (d != 0.0)  # bit 0 of w is the parity of r in units of the width
    return tl.where(move, other, r)


@triton.jit
def _full(a, nibble, z):
    """The endpoint of a's bracket nearest to the rollout's value; ``nibble`` its code, a = |z| clipped."""
    p = _binade(a)
    r = tl.fma(p, -MAGIC, tl.fma(p, MAGIC, a))
    d = a - r
    low = tl.where(d < 0.0, r - 0.5 * p, r)
    high = tl.where(d > 0.0, r + 0.5 * p, r)
    opposite = ((nibble << 28) ^ _bits(z + 0.0)) & SIGN
    q_roll = _float(((nibble & 7) << 22) | opposite) * 8.507059173023462e37  # 2**126; negative: on zero's other side
    return tl.maximum(low, tl.minimum(q_roll, high))


@triton.jit
def _tile(segment_rows, CHUNKS: tl.constexpr, R: tl.constexpr):
    """(segment, first row in it, first row of all as int64) of this program; CHUNKS programs a segment, 0: all there are.

    CHUNKS is a constant because dividing by it at run time would cost as much as two values.
    """
    pid = tl.program_id(0)
    if CHUNKS == 0:
        return 0, pid * R, pid.to(tl.int64) * R
    segment = pid // CHUNKS
    first = (pid % CHUNKS) * R
    return segment, first, segment.to(tl.int64) * segment_rows + first


@triton.jit
def _four(words, R: tl.constexpr):
    """The columns of int32 [R, 4]."""
    even, odd = tl.split(tl.reshape(words, (R, 2, 2)))
    w0, w2 = tl.split(even)
    w1, w3 = tl.split(odd)
    return w0, w1, w2, w3


@triton.jit
def guided_kernel(
    x_ptr, payload_ptr, scale_ptr, amax_ptr, out_ptr, segment_rows, amax_rows,
    BITS: tl.constexpr, CHUNKS: tl.constexpr, GATHER: tl.constexpr, EVEN: tl.constexpr, HARDWARE: tl.constexpr,
    WORDS: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Guided fake-quantise. A segment is a run of rows of eight that share one amax; GATHER: amax per row of eight instead.

    WORDS: x and out are int32 pointers to pairs of BF16, and the code of ``ptx`` does the rounding.
    """
    segment, first, base = _tile(segment_rows, CHUNKS, R)
    local = tl.arange(0, R)
    row = tl.max_contiguous(local, 1)  # one row a thread, as the values are: wider loads would go through shared memory
    mask = first + local < segment_rows
    WIDTH: tl.constexpr = 4 if WORDS else 8
    offset = local[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    x_ptr += base * WIDTH
    out_ptr += base * WIDTH
    payload_ptr += base
    scale_ptr += base // 2
    if EVEN:
        raw = tl.load(x_ptr + offset)
        byte = tl.load(scale_ptr + row // 2)
        payload = tl.load(payload_ptr + row).to(tl.int32)
    else:
        raw = tl.load(x_ptr + offset, mask=mask[:, None], other=0)
        byte = tl.load(scale_ptr + row // 2, mask=mask, other=0)
        payload = tl.load(payload_ptr + row, mask=mask, other=0).to(tl.int32)
    if GATHER:
        g = tl.load(amax_ptr + (base + local) // amax_rows, mask=mask, other=1.0)
    else:
        g = tl.load(amax_ptr + segment)
    factor = g * DECODE_448
    s_reciprocal = tl.div_rn(1.0, _encode_scale(g))
    if WORDS:
        scale = byte.to(tl.float8e4nv, bitcast=True).to(tl.float32)
        inverse = _inverse(scale, s_reciprocal)
        w0, w1, w2, w3 = _four(raw, R)
        o0, o1, o2, o3 = tl.inline_asm_elementwise(
            PTX_COMPACT if BITS == 1 else PTX_FULL,
            "=r,=r,=r,=r,r,r,r,r,r,f,f,f",
            [w0, w1, w2, w3, payload, inverse, scale * SCALE_SHIFT, factor * FACTOR_SHIFT],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
        out = tl.reshape(tl.join(tl.join(o0, o2), tl.join(o1, o3)), (R, 4))
    else:
        scale = _e4m3_float(byte.to(tl.int32))
        z = _widen(raw) * _inverse(scale, s_reciprocal)[:, None]
        a = _clip(z)
        lane = tl.arange(0, 8)[None, :]
        if BITS == 1:
            q = _compact(a, payload[:, None] >> lane)
        else:
            q = _full(a, (payload[:, None] >> (4 * lane)) & 15, z)
        if GATHER:
            value = (_signed(q, z) * scale[:, None]) * factor[:, None]
        else:
            value = (_signed(q, z) * scale[:, None]) * factor
        out = _narrow(value, out_ptr, HARDWARE)
    if EVEN:
        tl.store(out_ptr + offset, out)
    else:
        tl.store(out_ptr + offset, out, mask=mask[:, None])


@triton.jit
def _pack8(q, z, R: tl.constexpr):
    """Codes of grid magnitudes float32 [R, 8] with the signs of z, element 0 in the lowest nibble: int32 [R].

    q * 2**-126 is subnormal below 1 and normal from there on, so its bits are the three code bits at 22..24 and nothing else.
    """
    code = _bits(q * 1.1754943508222875e-38) | ((_bits(z + 0.0) >> 6) & (1 << 25))
    even, odd = tl.split(tl.reshape(code, (R, 4, 2)))
    pairs = ((even + odd * 16) >> 22) & 0xFF
    return tl.sum(pairs << (8 * tl.arange(0, 4)[None, :]), axis=1)


@triton.jit
def _pack_bits(word):
    """Bit 0 of each nibble of int32 words, packed to their low eight bits."""
    t = word & 0x11111111
    t = (t | (t >> 3)) & 0x03030303
    t = (t | (t >> 6)) & 0x000F000F
    return t | (t >> 12)


@triton.jit
def _spread(v, G: tl.constexpr):
    """[G] values, each repeated for the two rows of eight of its block: [2 G]."""
    return tl.reshape(tl.broadcast_to(v[:, None], (G, 2)), (2 * G,))


@triton.jit
def quantize_kernel(
    x_ptr, codes_ptr, scale_ptr, bits_ptr, amax_ptr, out_ptr, segment_rows, amax_rows,
    OWN: tl.constexpr, CODES: tl.constexpr, RECORD: tl.constexpr, VALUES: tl.constexpr, CHUNKS: tl.constexpr,
    GATHER: tl.constexpr, EVEN: tl.constexpr, HARDWARE: tl.constexpr, WORDS: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Quantise to nearest: any of codes with scales (CODES), mantissa bits (RECORD) and dequantised values (VALUES).

    OWN: the program sees a whole segment and writes its amax; else the amax is given, per segment or (GATHER) per row of eight.
    HARDWARE: code E4M3 and BF16 by the device's own conversions (compute capability 8.9 and newer), not by integer arithmetic.
    WORDS, without VALUES: x is an int32 pointer to pairs of BF16, and the code of ``ptx`` finds amaxes and codes.
    """
    segment, first, base = _tile(segment_rows, CHUNKS, R)
    local = tl.arange(0, R)
    pair = tl.arange(0, R // 2)
    mask = first + local < segment_rows
    pair_mask = first + 2 * pair < segment_rows
    WIDTH: tl.constexpr = 4 if WORDS else 8
    offset = local[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    if EVEN:
        raw = tl.load(x_ptr + base * WIDTH + offset)
    else:
        raw = tl.load(x_ptr + base * WIDTH + offset, mask=mask[:, None], other=0)
    if WORDS:
        w0, w1, w2, w3 = _four(raw, R)
        half = tl.inline_asm_elementwise(PTX_AMAX, "=f,r,r,r,r", [w0, w1, w2, w3], dtype=tl.float32, is_pure=True, pack=1)
    else:
        x = _widen(raw)
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
    scaled_amax = block * (s * SIXTH)
    if HARDWARE:
        e4m3 = tl.minimum(scaled_amax, 448.0, propagate_nan=tl.PropagateNan.ALL).to(tl.float8e4nv)
        byte = e4m3.to(tl.uint8, bitcast=True)
        scale_block = e4m3.to(tl.float32)
    else:
        code = _e4m3_byte(scaled_amax)
        byte = code.to(tl.uint8)
        scale_block = _e4m3_float(code)
    scale = _spread(scale_block, R // 2)
    inverse = _spread(_inverse(scale_block, tl.div_rn(1.0, s)), R // 2)
    if not WORDS:
        z = x * inverse[:, None]
        a = _clip(z)
        p = _binade(a)
        q = tl.fma(p, -MAGIC, tl.fma(p, MAGIC, a))
    if CODES:
        if WORDS:
            word = tl.inline_asm_elementwise(
                PTX_CODES, "=r,r,r,r,r,f", [w0, w1, w2, w3, inverse], dtype=tl.int32, is_pure=True, pack=1
            )
        else:
            word = _pack8(q, z, R)
        word = tl.where(scale == scale, word, 0)  # a NaN block has codes 0
        # contiguity 1 keeps one row a thread in the store as it is in registers; wider stores would go through shared memory
        row = tl.max_contiguous(local, 1)
        block_row = tl.max_contiguous(pair, 1)
        if EVEN:
            tl.store(codes_ptr + base + row, word)
            tl.store(scale_ptr + base // 2 + block_row, byte)
        else:
            tl.store(codes_ptr + base + row, word, mask=mask)
            tl.store(scale_ptr + base // 2 + block_row, byte, mask=pair_mask)
        if RECORD:
            bits = tl.where(scale > 0.0, _pack_bits(word), 0).to(tl.uint8)
            if EVEN:
                tl.store(bits_ptr + base + row, bits)
            else:
                tl.store(bits_ptr + base + row, bits, mask=mask)
    if VALUES:
        value = _signed(q, z) * scale[:, None]
        if GATHER:
            value = value * _spread(g * DECODE_448, R // 2)[:, None]
        else:
            value = value * (g * DECODE_448)
        if EVEN:
            tl.store(out_ptr + base * 8 + offset, _narrow(value, out_ptr, HARDWARE))
        else:
            tl.store(out_ptr + base * 8 + offset, _narrow(value, out_ptr, HARDWARE), mask=mask[:, None])


@triton.jit
def dequantize_kernel(
    codes_ptr, scale_ptr, amax_ptr, out_ptr, segment_rows, amax_rows,
    CHUNKS: tl.constexpr, GATHER: tl.constexpr, EVEN: tl.constexpr, HARDWARE: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """(code * scale) * (amax * fl(1/2688)). Segments and GATHER as in ``guided_kernel``."""
    segment, first, base = _tile(segment_rows, CHUNKS, R)
    local = tl.arange(0, R)
    mask = first + local < segment_rows
    offset = local[:, None] * 8 + tl.arange(0, 8)[None, :]
    if EVEN:
        word = tl.load(codes_ptr + base + local)
        byte = tl.load(scale_ptr + base // 2 + local // 2).to(tl.int32)
    else:
        word = tl.load(codes_ptr + base + local, mask=mask, other=0)
        byte = tl.load(scale_ptr + base // 2 + local // 2, mask=mask, other=0).to(tl.int32)
    nibble = word[:, None] >> (4 * tl.arange(0, 8)[None, :])
    q = _float(((nibble & 7) << 22) | ((nibble << 28) & SIGN)) * 8.507059173023462e37  # 2**126
    value = q * _e4m3_float(byte)[:, None]
    if GATHER:
        g = tl.load(amax_ptr + (base + local) // amax_rows, mask=mask, other=0.0)
        value = value * (g * DECODE_448)[:, None]
    else:
        value = value * (tl.load(amax_ptr + segment) * DECODE_448)
    if EVEN:
        tl.store(out_ptr + base * 8 + offset, _narrow(value, out_ptr, HARDWARE))
    else:
        tl.store(out_ptr + base * 8 + offset, _narrow(value, out_ptr, HARDWARE), mask=mask[:, None])


@triton.jit
def gather_kernel(
    rows_ptr, index_ptr, payload_ptr, scale_ptr, amax_ptr, count, row_units, start,
    PAYLOAD: tl.constexpr, SCALES: tl.constexpr, AMAX: tl.constexpr, ROWS: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Copy one column of records, rows index[i], into contiguous payload, scales and amaxes.

    Pointers are to units of one or four bytes; PAYLOAD, SCALES and AMAX are a row's units of each. A program copies ROWS rows
    as one run of ROWS * (PAYLOAD + SCALES + AMAX) <= B units, so that no lane idles at the end of a row.
    """
    TOTAL: tl.constexpr = PAYLOAD + SCALES + AMAX
    local = tl.arange(0, B)
    i = tl.program_id(0).to(tl.int64) * ROWS + local // TOTAL
    unit = local % TOTAL
    mask = (local < ROWS * TOTAL) & (i < count)
    source = tl.load(index_ptr + i, mask=mask, other=0).to(tl.int64) * row_units + start
    value = tl.load(rows_ptr + source + unit, mask=mask)
    in_payload = unit < PAYLOAD
    in_scales = (unit >= PAYLOAD) & (unit < PAYLOAD + SCALES)
    tl.store(payload_ptr + i * PAYLOAD + unit, value, mask=mask & in_payload)
    tl.store(scale_ptr + i * SCALES + (unit - PAYLOAD), value, mask=mask & in_scales)
    if AMAX > 0:
        tl.store(amax_ptr + i * AMAX + (unit - PAYLOAD - SCALES), value, mask=mask & (unit >= PAYLOAD + SCALES))
