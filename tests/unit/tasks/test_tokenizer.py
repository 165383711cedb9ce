"""The character tokenizer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_trace.tasks.tokenizer import ARITHMETIC_ALPHABET, TEXT_ALPHABET, UNKNOWN, CharTokenizer

ARITHMETIC = CharTokenizer(ARITHMETIC_ALPHABET)


def test_ids_are_fixed() -> None:
    assert (ARITHMETIC.pad_id, ARITHMETIC.bos_id, ARITHMETIC.eos_id) == (0, 1, 2)
    assert ARITHMETIC.encode("0") == (3,)
    assert ARITHMETIC.encode("9+-=,.? az") == (12, 13, 14, 15, 16, 17, 18, 19, 20, 45)
    assert ARITHMETIC.vocab_size == 46
    assert CharTokenizer(TEXT_ALPHABET).vocab_size == 99


@given(st.text(alphabet=TEXT_ALPHABET))
def test_decode_inverts_encode(text: str) -> None:
    tokenizer = CharTokenizer(TEXT_ALPHABET)
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(st.lists(st.integers(min_value=-5, max_value=200)))
def test_any_ids_decode_to_one_character_each(ids: list[int]) -> None:
    text = ARITHMETIC.decode(ids)
    assert len(text) == len(ids)
    assert [character == UNKNOWN for character in text] == [not 3 <= token < 46 for token in ids]


def test_a_character_outside_the_alphabet_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"'A' in '1A': not in the tokenizer's alphabet"):
        ARITHMETIC.encode("1A")


def test_an_alphabet_must_not_repeat_itself() -> None:
    with pytest.raises(ValueError, match="every character must be there once"):
        CharTokenizer("aba")


def test_a_response_ends_at_the_first_end_of_sequence() -> None:
    one, two = ARITHMETIC.encode("12")
    assert ARITHMETIC.response_text([one, 2, two, 2]) == ("1", True)
    assert ARITHMETIC.response_text([one, two]) == ("12", False)
    assert ARITHMETIC.response_text([2]) == ("", True)
    assert ARITHMETIC.response_text([]) == ("", False)
