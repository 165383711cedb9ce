"""Syndrome guidance: the trainer already knows nearly every codeword, so send only what tells the few wrong ones.

Slepian-Wolf coding with the trainer's own values as side information. Per block of 16 codes the record holds the syndrome of
their mantissa bits, s = XOR of a column of the check matrix for every bit that is 1; the low 3 bits of the block scale; per row
the BF16 amax; per 512 values a 16-bit checksum. The trainer rounds to nearest on the recovered scale, computes its own
syndrome, and flips (to the other endpoint of the bracket) the cheapest set of values whose columns XOR to the difference. The
cost of a flip is the distance of z from its bracket's midpoint; a value on the grid never flips. Where the checksum disagrees,
the next-cheapest sets of the chunk's blocks are tried; if none agrees the decoded bits are kept and counted as unverified.

Codes: 5 bits per 16, column 16 + i (extended Hamming); 9 bits per 16, column (1, i, i^3) over GF(16) (extended BCH, distance
6); 16, the bits themselves. Axis legend: N rows, K values, B = K / 16 blocks of a row, C chunks of 512 values, M positions
searched.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from megatron_trace.guidance.errors import LayerError
from megatron_trace.guidance.spec import BLOCK, CHECK_VALUES, Column
from megatron_trace.numerics import e2m1, nvfp4
from megatron_trace.numerics.guided import GuidanceRecord
from megatron_trace.numerics.nvfp4 import NVFP4Tensor

POSITIONS = {5: 8, 9: 9}
"""Most uncertain values of a block whose subsets are searched: 2**M of them."""
CANDIDATES = 4
"""Cheapest sets of a block that are kept for retries."""
CHUNK_BLOCKS = CHECK_VALUES // BLOCK
_PAIR_BLOCKS = 8
_SLICE = 1 << 14
"""Blocks searched at a time (2**M subsets each)."""


CODE_LIMITS: tuple[tuple[float, int], ...] = ((0.045, 5), (0.07, 9))
"""(largest share of flipped codes, bits per 16 codes): beyond the last the bits themselves are sent."""


def code_for(flip_rate: float) -> int:
    """Bits per 16 codes for a column whose codes differ from nearest rounding at ``flip_rate`` (0 to 1), as last measured.

    5/16 up to 4.5% and 9/16 up to 7%, where each leaves about 0.5% of the codes wrong at most; the bits themselves beyond.
    """
    return next((bits for limit, bits in CODE_LIMITS if flip_rate <= limit), BLOCK)


@dataclass(frozen=True)
class Decoded:
    """``record`` of bits=1 with the rollout's mantissa bits, scales and amax as recovered.

    ``unverified`` bool [N, C]: chunks whose checksum still disagrees; ``retried`` [N, C]: those that agreed only after a retry.
    """

    record: GuidanceRecord
    unverified: Tensor
    retried: Tensor


@torch.no_grad()
def encode(q: NVFP4Tensor, column: Column) -> Tensor:
    """Record bytes uint8 [N, column.size] of a quantised tensor [N, K].

    ValueError when a row amax is not a BF16 value: the source then was not rounded to BF16, and 2 bytes cannot carry it.
    """
    bits_NK = (e2m1.unpack(q.codes) & 1) * _alive(q.block_scale).repeat_interleave(BLOCK, -1)
    scale_NB = q.block_scale.view(torch.uint8)
    syndrome_NB = _syndrome(bits_NK, column.block_bits)
    parts = [pack(syndrome_NB, column.block_bits), pack(scale_NB.int() & 7, 3)]
    if column.amax_bytes:
        amax = q.global_amax.reshape(len(bits_NK), -1)
        if not torch.equal(amax.bfloat16().float(), amax):
            raise ValueError(
                "syndrome guidance sends the row amax as BF16, but it is none: values must be BF16 before rounding"
            )
        parts.append(amax.bfloat16().view(torch.uint8))
    parts.append(_check(bits_NK, scale_NB).short().view(torch.uint8))
    return torch.cat(parts, dim=-1)


@torch.no_grad()
def decode(x: Tensor, data: Tensor, column: Column, *, static_amax: Tensor | None = None) -> Decoded:
    """What the rollout rounded to, from record bytes uint8 [N, column.size] and the trainer's own values ``x`` [N, K].

    ``static_amax`` float32 [N, 1] where the record carries none. LayerError when the widths differ.
    """
    if x.shape[-1] != column.width or data.shape[-1] != column.size:
        raise LayerError(f"{column.site} of layer {column.layer}: record of {column.width} values, x has {x.shape[-1]}")
    part = {name: data[:, a - column.start : b - column.start] for name, a, b in column.parts}
    blocks = column.width // BLOCK
    if column.amax_bytes:
        amax_N1 = part["amax"].contiguous().view(torch.bfloat16).float()
    else:
        assert static_amax is not None
        amax_N1 = static_amax
    scale_NB = _recover_scale(x, amax_N1, unpack(part["scale"], 3, blocks))
    z_NK = nvfp4.scaled(x.float(), scale_NB.float(), nvfp4.encode_scale(amax_N1))
    alive_NB = _alive(scale_NB)
    own_NK = (e2m1.codes_from_values(e2m1.round_to_nearest(z_NK)) & 1) * alive_NB.repeat_interleave(BLOCK, -1)
    sent_NB = unpack(part["codes"], column.block_bits, blocks)
    check_NC = part["check"].contiguous().view(torch.int16)
    if column.block_bits == BLOCK:
        bits_NK = ((sent_NB.unsqueeze(-1) >> torch.arange(BLOCK, device=x.device)) & 1).to(torch.uint8).flatten(1)
        wrong_NC = _check(bits_NK, scale_NB.view(torch.uint8)).short() != check_NC
        retried_NC = torch.zeros_like(wrong_NC)
    else:
        cost_NBM = _flip_cost(z_NK).view(len(x), blocks, BLOCK)
        difference_NB = (sent_NB ^ _syndrome(own_NK, column.block_bits)) * alive_NB
        search = _Search(cost_NBM, difference_NB, column.block_bits)
        bits_NK = own_NK ^ search.cheapest().flatten(1)
        bits_NK, wrong_NC, retried_NC = _retry(bits_NK, own_NK, scale_NB.view(torch.uint8), check_NC, search)
    record = GuidanceRecord(bits=1, payload=pack(bits_NK.int(), 1), block_scale=scale_NB, global_amax=amax_N1, valid=None)
    return Decoded(record=record, unverified=wrong_NC, retried=retried_NC)


@torch.no_grad()
def recode(codes: Tensor, block_scale: Tensor, amax: Tensor, column: Column) -> Tensor:
    """``encode`` from the parts of a 4-bit record: ``codes`` uint8 [N, K/2], scales uint8 [N, B], ``amax`` [N, 1] or []."""
    q = NVFP4Tensor(codes=codes, block_scale=block_scale.view(torch.float8_e4m3fn), global_amax=amax)
    return encode(q, column)


def pack(values: Tensor, bits: int) -> Tensor:
    """Integers [N, n] of ``bits`` bits each as one bit stream per row, lowest bit first: uint8 [N, ceil(n * bits / 8)]."""
    stream = ((values.unsqueeze(-1) >> torch.arange(bits, device=values.device)) & 1).flatten(1)
    stream = torch.nn.functional.pad(stream, (0, -stream.shape[-1] % 8))
    weights = 1 << torch.arange(8, device=values.device)
    return (stream.view(len(values), -1, 8) * weights).sum(-1).to(torch.uint8)


def unpack(data: Tensor, bits: int, count: int) -> Tensor:
    """Inverse of ``pack``: int32 [N, count]."""
    stream = ((data.unsqueeze(-1) >> torch.arange(8, device=data.device)) & 1).flatten(1)[:, : count * bits]
    weights = 1 << torch.arange(bits, device=data.device, dtype=torch.int32)
    return (stream.view(len(data), count, bits) * weights).sum(-1).int()


def columns_of(block_bits: int) -> list[int]:
    """Columns of the check matrix for the 16 places of a block."""
    if block_bits == 5:
        return [16 + i for i in range(BLOCK)]
    return [256 | i << 4 | _gf16(i, _gf16(i, i)) for i in range(BLOCK)]


def _gf16(a: int, b: int) -> int:
    """Product in GF(16) with x^4 = x + 1."""
    product = 0
    for shift in range(4):
        product ^= (a << shift) * (b >> shift & 1)
    for shift in (6, 5, 4):
        product ^= (0b10011 << shift - 4) * (product >> shift & 1)
    return product


@lru_cache(maxsize=16)
def _tables(block_bits: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Columns int32 [16], and the check hashes int32 [32 blocks, 16 places]; built outside inference mode."""
    with torch.inference_mode(False):
        columns = torch.tensor(columns_of(block_bits), dtype=torch.int32) if block_bits != BLOCK else torch.zeros(BLOCK).int()
        return columns.to(device), _hashes()[0].view(CHUNK_BLOCKS, BLOCK).to(device)


@lru_cache(maxsize=1)
def _hashes() -> tuple[Tensor, Tensor]:
    """Fixed pseudo-random 16-bit numbers, int32: for each of the 512 bits, and for each bit of each of the 32 scale bytes."""
    with torch.inference_mode(False):
        generator = torch.Generator().manual_seed(0x5EED)
        return tuple(torch.randint(1, 1 << 16, (n,), generator=generator).int() for n in (CHECK_VALUES, 8 * CHUNK_BLOCKS))  # type: ignore[return-value]


def _xor_sum(bits: Tensor, numbers: Tensor, width: int) -> Tensor:
    """XOR over the last axis of ``numbers`` int32 [n] where ``bits`` [..., n] are 1: int32 [...]."""
    shifts = torch.arange(width, device=bits.device, dtype=torch.int32)
    planes = ((numbers.to(bits.device).unsqueeze(-1) >> shifts) & 1).float()
    parity = (bits.float() @ planes).int() & 1  # at most 512 ones: exact in FP32
    return (parity << shifts).sum(-1).int()


def _syndrome(bits_NK: Tensor, block_bits: int) -> Tensor:
    """int32 [N, B]."""
    blocks = bits_NK.view(len(bits_NK), -1, BLOCK)
    if block_bits == BLOCK:
        return (blocks.int() << torch.arange(BLOCK, device=bits_NK.device)).sum(-1).int()
    return _xor_sum(blocks, _tables(block_bits, bits_NK.device)[0], block_bits)


def _check(bits_NK: Tensor, scale_NB: Tensor) -> Tensor:
    """16-bit checksums int32 [N, C] over mantissa bits and scale bytes; the last chunk may be short."""
    bit_hash, scale_hash = _hashes()
    n, chunks = len(bits_NK), -(-bits_NK.shape[-1] // CHECK_VALUES)
    bits = torch.nn.functional.pad(bits_NK, (0, chunks * CHECK_VALUES - bits_NK.shape[-1])).view(n, chunks, CHECK_VALUES)
    scale = torch.nn.functional.pad(scale_NB, (0, chunks * CHUNK_BLOCKS - scale_NB.shape[-1])).view(n, chunks, CHUNK_BLOCKS)
    scale_bits = ((scale.unsqueeze(-1) >> torch.arange(8, device=scale.device)) & 1).flatten(2)
    return _xor_sum(bits, bit_hash, 16) ^ _xor_sum(scale_bits, scale_hash, 16)


def _alive(block_scale: Tensor) -> Tensor:
    """uint8 1 where a block's scale is not 0: in others the bits mean nothing and are 0."""
    return (block_scale.view(torch.uint8) & 0x7F).ne(0).to(torch.uint8)


def _recover_scale(x: Tensor, amax_N1: Tensor, low_NB: Tensor) -> Tensor:
    """The scale nearest the trainer's own (under the rollout's amax) whose byte has the sent low bits: float8_e4m3fn [N, B]."""
    own = nvfp4.block_scale_from_amax(nvfp4.block_amax(x.float().abs()), nvfp4.encode_scale(amax_N1)).view(torch.uint8).int()
    step = (low_NB - own) & 7  # 0..7 upwards; 5, 6, 7 are nearer downwards
    byte = own + torch.where(step > 4, step - 8, step)
    byte = torch.where(byte < 0, byte + 8, torch.where(byte > 0x7E, byte - 8, byte))
    return byte.to(torch.uint8).view(torch.float8_e4m3fn)


def _flip_cost(z_NK: Tensor) -> Tensor:
    """Distance of z from its bracket's midpoint; infinite on the grid."""
    step = e2m1.steps(z_NK)
    t = z_NK / step
    part = t - t.floor()
    return torch.where(part == 0, torch.inf, (part - 0.5).abs() * step)


class _Search:
    """Sets of values of each block whose flips explain its syndrome difference, cheapest first."""

    def __init__(self, cost_NBM: Tensor, difference_NB: Tensor, block_bits: int) -> None:
        self.cost = cost_NBM
        self.difference = difference_NB
        self.block_bits = block_bits
        self.m = POSITIONS[block_bits]

    def cheapest(self) -> Tensor:
        """uint8 [N, B, 16]: the flips of the cheapest set; none where no set explains the difference."""
        flips = torch.zeros_like(self.cost, dtype=torch.uint8)
        at = self.difference.nonzero()
        for some in at.split(_SLICE):
            place = (some[:, 0], some[:, 1])
            sets, cost, _ = self.sets(place, 1)
            flips[place] = _mask(sets[:, 0]) * cost[:, 0].isfinite().unsqueeze(-1).to(torch.uint8)
        return flips

    def sets(self, place: tuple[Tensor, Tensor], count: int) -> tuple[Tensor, Tensor, Tensor]:
        """For blocks ``place``: the ``count`` cheapest sets as bit masks int32 [b, count], their costs and their check hashes.

        Sets that do not explain the difference have infinite cost.
        """
        cost_b, column_16 = self.cost[place], _tables(self.block_bits, self.cost.device)[0]
        hash_b16 = _tables(self.block_bits, self.cost.device)[1][place[1] % CHUNK_BLOCKS]
        near_bM, index_bM = cost_b.topk(self.m, dim=-1, largest=False)
        word_bM = column_16[index_bM] | hash_b16.gather(1, index_bM) << 9  # column and check hash, XORed in one go
        mask_bM = torch.ones_like(word_bM) << index_bM.int()
        word, cost, mask = (t.new_zeros(len(cost_b), 1) for t in (word_bM, near_bM, mask_bM))
        for j in range(self.m):
            word = torch.cat((word, word ^ word_bM[:, j : j + 1]), 1)
            cost = torch.cat((cost, cost + near_bM[:, j : j + 1]), 1)
            mask = torch.cat((mask, mask | mask_bM[:, j : j + 1]), 1)
        wanted = (word & 511) == self.difference[place].unsqueeze(-1)
        cost, best = cost.masked_fill(~wanted, torch.inf).topk(count, dim=-1, largest=False)
        return mask.gather(1, best), cost, word.gather(1, best) >> 9


def _mask(sets: Tensor) -> Tensor:
    """Bit masks int32 [b] as uint8 [b, 16]."""
    return ((sets.unsqueeze(-1) >> torch.arange(BLOCK, device=sets.device)) & 1).to(torch.uint8)


def _retry(
    bits_NK: Tensor, own_NK: Tensor, scale_NB: Tensor, check_NC: Tensor, search: _Search
) -> tuple[Tensor, Tensor, Tensor]:
    """Try the next-cheapest sets of one block, then of two, where a checksum disagrees: (bits, still wrong, put right)."""
    wrong_NC = _check(bits_NK, scale_NB).short() != check_NC
    retried_NC = torch.zeros_like(wrong_NC)
    missing_NC = (_check(bits_NK, scale_NB) ^ check_NC.int()) & 0xFFFF
    blocks = bits_NK.shape[-1] // BLOCK
    out = bits_NK.view(len(bits_NK), blocks, BLOCK).clone()
    own = own_NK.view_as(out)
    for some in wrong_NC.nonzero().split(_SLICE // CHUNK_BLOCKS):
        row, chunk = some.unbind(1)
        block = chunk.unsqueeze(1) * CHUNK_BLOCKS + torch.arange(CHUNK_BLOCKS, device=row.device)
        there = block < blocks
        place = (row.unsqueeze(1).expand_as(block).flatten(), block.clamp(max=blocks - 1).flatten())
        sets, cost, hashes = (t.view(len(row), CHUNK_BLOCKS, CANDIDATES) for t in search.sets(place, CANDIDATES))
        # A block with no explaining set was left at the trainer's own bits: hash 0, cost 0.
        found = cost[..., :1].isfinite()
        first_hash, first_cost = hashes[..., :1] * found, torch.where(found, cost[..., :1], 0.0)
        extra = torch.where(there.unsqueeze(-1), cost[..., 1:] - first_cost, torch.inf).flatten(1)
        change = (hashes[..., 1:] ^ first_hash).flatten(1)
        chosen = _explanation(extra, change, missing_NC[row, chunk])
        for b, picks in enumerate(chosen):
            for pick in picks:
                at, candidate = divmod(pick, CANDIDATES - 1)
                out[row[b], block[b, at]] = own[row[b], block[b, at]] ^ _mask(sets[b, at, candidate + 1])
            if picks:
                wrong_NC[row[b], chunk[b]], retried_NC[row[b], chunk[b]] = False, True
    return out.flatten(1), wrong_NC, retried_NC


def _explanation(extra: Tensor, change: Tensor, missing: Tensor) -> list[list[int]]:
    """For each chunk the cheapest alternative, else pair of alternatives, whose hashes XOR to what is missing; else nothing."""
    single = extra.masked_fill(change != missing.unsqueeze(-1), torch.inf)
    cost_1, best_1 = single.min(-1)
    few_cost, few = extra.topk(min(_PAIR_BLOCKS, extra.shape[-1]), dim=-1, largest=False)
    few_change = change.gather(1, few)
    n = few.shape[-1]
    pair_cost = few_cost.unsqueeze(2) + few_cost.unsqueeze(1)
    other_block = (few // (CANDIDATES - 1)).unsqueeze(2) != (few // (CANDIDATES - 1)).unsqueeze(1)
    agrees = (few_change.unsqueeze(2) ^ few_change.unsqueeze(1)) == missing.view(-1, 1, 1)
    cost_2, best_2 = pair_cost.masked_fill(~(agrees & other_block), torch.inf).flatten(1).min(-1)
    chosen: list[list[int]] = []
    for b in range(len(missing)):
        if cost_1[b].isfinite():
            chosen.append([int(best_1[b])])
        elif cost_2[b].isfinite():
            chosen.append([int(few[b, best_2[b] // n]), int(few[b, best_2[b] % n])])
        else:
            chosen.append([])
    return chosen
