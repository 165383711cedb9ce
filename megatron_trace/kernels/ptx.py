"""PTX for a row of eight BF16 values, used where the device has BF16 arithmetic of its own (compute capability 8.9 and newer).

Each text is the body of one ``tl.inline_asm_elementwise`` over tensors of rows of eight: four 32-bit words hold the eight
values, value 2j in the low half of word j. It equals the portable code of ``nvfp4_kernels`` bit for bit in about half as many
instructions; ``tests/unit/kernels/test_ptx.py`` proves the equality on a CPU by executing the text.

The ladder. Floats below 2**-123 with two significant bits are spaced as E2M1 is: the bits of z * 2**-126, taken as an integer,
are the E2M1 index of z times 2**22 plus a fraction (index 1 is 0.5, 4 is 2, 7 is 6; below index 2 the float is subnormal). So
rounding the product down gives the index of the bracket's lower end from bit 22 on; rounding it up and adding 2**22 - 1 gives
the upper end's. Both are the same on the grid only: what one rounding loses of z, the other keeps.

Exactness of the value. code * 2**-126 is multiplied by scale * 2**118, which is exact, then by (amax * fl(1/2688)) * 2**8: the
one rounding of ``numerics.nvfp4``'s order, of the same real product. No factor overflows: scale <= 448, and the other is less
than 2**117 before its shift.

NaN. min.NaN keeps it; its bits are 0x7FFFFFFF, which the unsigned minimum and the mask leave a NaN.
"""

from __future__ import annotations

CODE_UNIT = 0x00800000
"""2**-126 as float bits."""
INDEX = 0x00400000
"""One step of the ladder."""
SCALE_SHIFT = 2.0**118
FACTOR_SHIFT = 2.0**8


def _clip(word: str, inverse: str) -> str:
    """a and b become min(|z|, 6), z = x * inverse, of the word's halves; s holds the signs of both z, -0.0 counting as +0.0."""
    return f"""
        shl.b32 a, {word}, 16; and.b32 b, {word}, 0xffff0000;
        mul.rn.f32 a, a, {inverse}; add.rn.f32 a, a, 0f00000000;
        mul.rn.f32 b, b, {inverse}; add.rn.f32 b, b, 0f00000000;
        cvt.rn.bf16x2.f32 s, b, a;
        abs.f32 a, a; min.NaN.f32 a, a, 0f40C00000;
        abs.f32 b, b; min.NaN.f32 b, b, 0f40C00000;"""


def _ends(z: str, lower: str, upper: str) -> str:
    """Ladder bits of z rounded down; of z rounded up, plus one step less one."""
    return f"""
        mul.rz.f32 {lower}, {z}, 0f{CODE_UNIT:08X};
        mul.rp.f32 {upper}, {z}, 0f{CODE_UNIT:08X};
        add.u32 {upper}, {upper}, {INDEX - 1:#x};"""


def _compact(k: int, z: str, payload: str) -> str:
    """z becomes the ladder bits of the bracket's end whose index has payload bit k as its bit 0."""
    return f"""
        {_ends(z, "lower", "upper")}
        shl.b32 t, {payload}, {22 - k};
        xor.b32 t, t, lower;
        and.b32 t, t, {INDEX:#x};
        setp.ne.u32 other, t, 0;
        @other min.u32 lower, upper, 0x7fc00000;
        and.b32 {z}, lower, 0xffc00000;"""


def _full(k: int, z: str, payload: str) -> str:
    """z becomes the ladder bits of the rollout's magnitude (nibble k) clamped to the bracket."""
    shift = 22 - 4 * k
    move = f"shl.b32 t, {payload}, {shift};" if shift >= 0 else f"shr.u32 t, {payload}, {-shift};"
    return f"""
        {_ends(z, "lower", "upper")}
        {move}
        and.b32 t, t, 0x01c00000;
        min.s32 t, upper, t;
        max.s32 t, t, lower;
        and.b32 {z}, t, 0xffc00000;"""


def _values(out: str, scale: str, factor: str) -> str:
    """Two BF16 values from ladder bits a and b, with the signs of s."""
    return f"""
        mul.rn.f32 a, a, {scale}; mul.rn.f32 a, a, {factor};
        mul.rn.f32 b, b, {scale}; mul.rn.f32 b, b, {factor};
        cvt.rn.bf16x2.f32 t, b, a;
        and.b32 s, s, 0x80008000;
        or.b32 {out}, t, s;"""


_HEAD = """{
        .reg .pred other;
        .reg .b32 a, b, s, t, lower, upper, pay;"""

_SAME_SIGN = """
        // a magnitude of the rollout whose sign is not x's becomes 0, the end of the bracket on its side
        prmt.b32 s, $4, $5, 0x7351; prmt.b32 t, $6, $7, 0x7351;
        prmt.b32 a, s, t, 0x5410; prmt.b32 b, s, t, 0x7632;
        shr.u32 a, a, 4; and.b32 a, a, 0x08080808;
        and.b32 b, b, 0x80808080; or.b32 a, a, b;
        xor.b32 a, a, $8; and.b32 a, a, 0x88888888;
        shr.u32 a, a, 3; mul.lo.u32 a, a, 7;
        not.b32 a, a; and.b32 pay, a, $8;"""


def guided(bits: int) -> str:
    """Four words of fake-quantised values, $0..$3, from

    $4..$7 words, $8 payload (eight bits or eight nibbles, value 0 lowest), $9 float32 inverse scale, $10 scale * 2**118,
    $11 factor * 2**8.
    """
    parts = [_HEAD, _SAME_SIGN if bits == 4 else "mov.b32 pay, $8;"]
    rule = _full if bits == 4 else _compact
    for j in range(4):
        parts.append(_clip(f"${4 + j}", "$9"))
        parts += [rule(2 * j, "a", "pay"), rule(2 * j + 1, "b", "pay")]
        parts.append(_values(f"${j}", "$10", "$11"))
    return "\n".join([*parts, "}"])


def _nearest(z: str) -> str:
    """z rounded to the grid, half to even: the float32 adder at p = 2**floor(log2(max(z, 1)))."""
    return f"""
        max.f32 p, {z}, 0f3F800000; and.b32 p, p, 0x7f800000;
        fma.rn.f32 {z}, p, 0f4AC00000, {z}; fma.rn.f32 {z}, p, 0fCAC00000, {z};"""


def codes() -> str:
    """The word of eight nearest codes, $0, value 0 in the lowest nibble, from $1..$4 words and $5 float32 inverse scale."""
    parts = [
        """{
        .reg .b32 a, b, s, p, minus, unit, y0, y1, y2, y3;
        mov.b32 minus, 0x80008000; mov.b32 unit, 0x00800080;"""
    ]
    for j in range(4):
        parts += [_clip(f"${1 + j}", "$5"), _nearest("a"), _nearest("b")]
        # times 2**-126 in BF16 the code's three bits are bits 6..8 of a half, and the sign goes to bit 9; the product puts the
        # two nibbles side by side into the top byte
        parts.append(f"""
        cvt.rn.bf16x2.f32 a, b, a;
        fma.rn.bf16x2 a, a, unit, minus;
        shr.u32 s, s, 6; and.b32 s, s, 0x02000200; or.b32 a, a, s;
        mul.lo.u32 y{j}, a, 0x00040040;""")
    parts.append("prmt.b32 a, y0, y1, 0x0073; prmt.b32 b, y2, y3, 0x0073; prmt.b32 $0, a, b, 0x5410;\n}")
    return "\n".join(parts)


def amax() -> str:
    """The largest magnitude (NaN if any is NaN) as float32, $0, from $1..$4 words."""
    return """{
        .reg .b32 a, b, c, d;
        abs.bf16x2 a, $1; abs.bf16x2 b, $2; abs.bf16x2 c, $3; abs.bf16x2 d, $4;
        max.NaN.bf16x2 a, a, b; max.NaN.bf16x2 c, c, d; max.NaN.bf16x2 a, a, c;
        shl.b32 b, a, 16; and.b32 a, a, 0xffff0000;
        max.NaN.f32 $0, a, b;
}"""
