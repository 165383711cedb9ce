"""Packing of rows, per-sequence sums, and the temperature convention."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_trace.rl.logprobs import token_entropy, token_logprobs
from megatron_trace.rl.sequences import count_sequences, pack_rows, sequence_sum


def test_an_empty_first_row_is_not_an_absent_one() -> None:
    """SkyRL pull 176: a truth test on the first sample's list dropped everyone's log-probabilities."""
    packed = pack_rows([torch.zeros(0), torch.tensor([-1.0, -2.0]), torch.tensor([-3.0])])
    assert packed is not None
    values, ids = packed
    assert values.tolist() == [-1.0, -2.0, -3.0] and ids.tolist() == [1, 1, 2]
    assert pack_rows([None, None]) is None
    with pytest.raises(ValueError, match=r"rows\[1\]=None: 1 of 3"):
        pack_rows([torch.zeros(0), None, torch.zeros(1)])


def test_sequence_sums_in_both_layouts() -> None:
    values = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    assert sequence_sum(values).tolist() == [[3.0, 3.0], [7.0, 7.0]]
    ids = torch.tensor([8, -1, 8, 3])
    assert sequence_sum(values.reshape(-1), sequence_ids=ids).tolist() == [4.0, 2.0, 4.0, 4.0]
    assert count_sequences(ids.bool(), sequence_ids=ids).item() == 2
    assert count_sequences(values).item() == 2
    with pytest.raises(ValueError, match="sequence_ids of shape"):
        sequence_sum(values, sequence_ids=ids)
    with pytest.raises(ValueError, match="sequence_ids=None"):
        count_sequences(ids)


def test_one_temperature_on_both_sides() -> None:
    """T = 0.6: ratios are 1 when both sides temper, and off everywhere when one does not (trl issue 4159)."""
    logits = torch.randn(2000, 11, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 2
    sampled = torch.multinomial((logits / 0.6).softmax(-1), 1, generator=torch.Generator().manual_seed(1)).squeeze(-1)
    engine = (logits / 0.6).log_softmax(-1)[torch.arange(2000), sampled]
    both = token_logprobs(logits, sampled, temperature=0.6)
    torch.testing.assert_close(both, engine, rtol=1e-12, atol=1e-12)
    one_sided = token_logprobs(logits, sampled, temperature=1.0)
    assert (one_sided - engine).abs().mean() > 0.05


def test_greedy_reports_the_untempered_softmax() -> None:
    logits = torch.randn(5, 7)
    tokens = logits.argmax(-1)
    torch.testing.assert_close(token_logprobs(logits, tokens, temperature=0.0), logits.log_softmax(-1)[torch.arange(5), tokens])
    with pytest.raises(ValueError, match="temperature=-1"):
        token_logprobs(logits, tokens, temperature=-1.0)


def test_entropy_of_known_distributions() -> None:
    logits = torch.tensor([[0.0, 0.0, 0.0, 0.0], [100.0, 0.0, 0.0, 0.0], [math.log(3.0), 0.0, -1e30, -1e30]])
    expected = [math.log(4), 0.0, -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))]
    assert token_entropy(logits, temperature=1.0).tolist() == pytest.approx(expected, abs=1e-6)
    half = token_entropy(torch.tensor([[math.log(3.0), 0.0]]), temperature=0.5)
    assert half.item() == pytest.approx(-(0.9 * math.log(0.9) + 0.1 * math.log(0.1)), rel=1e-6)
