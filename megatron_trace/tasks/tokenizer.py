"""A tokenizer of one token per character: three special tokens, then the alphabet in order."""

from __future__ import annotations

import string
from collections.abc import Sequence

ARITHMETIC_ALPHABET = string.digits + "+-=,.? " + string.ascii_lowercase
"""All that arithmetic problems, in numbers or in words, are written with."""
TEXT_ALPHABET = "\n" + "".join(chr(code) for code in range(32, 127))
"""Newline and printable ASCII."""

UNKNOWN = "\ufffd"
"""What ``decode`` puts for an id that stands for no character: specials and unused rows of the embedding."""


class CharTokenizer:
    """Ids 0, 1, 2 are padding, begin and end of sequence; id ``3 + i`` is ``alphabet[i]``."""

    pad_id = 0
    bos_id = 1
    eos_id = 2
    _SPECIALS = 3

    def __init__(self, alphabet: str) -> None:
        if len(set(alphabet)) != len(alphabet) or UNKNOWN in alphabet:
            raise ValueError(f"alphabet={alphabet!r}: every character must be there once, and U+FFFD not at all")
        self.alphabet = alphabet
        self._id_of = {character: self._SPECIALS + index for index, character in enumerate(alphabet)}

    @property
    def vocab_size(self) -> int:
        """Number of ids in use; the model's embedding may have more rows."""
        return self._SPECIALS + len(self.alphabet)

    def encode(self, text: str) -> tuple[int, ...]:
        """Ids of ``text``, no special tokens added; raises ValueError at a character outside the alphabet."""
        try:
            return tuple(self._id_of[character] for character in text)
        except KeyError as error:
            raise ValueError(
                f"{error.args[0]!r} in {text!r}: not in the tokenizer's alphabet of {len(self.alphabet)}"
            ) from None

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ``ids``, one character each; never fails: an id without a character becomes U+FFFD."""
        return "".join(
            self.alphabet[token - self._SPECIALS] if self._SPECIALS <= token < self.vocab_size else UNKNOWN for token in ids
        )

    def response_text(self, ids: Sequence[int]) -> tuple[str, bool]:
        """Text up to the first end of sequence, and whether there was one."""
        tokens = list(ids)
        ended = self.eos_id in tokens
        return self.decode(tokens[: tokens.index(self.eos_id)] if ended else tokens), ended
