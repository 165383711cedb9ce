"""Pages of the KV cache: who holds them, and which ones already hold a prefix.

A page is ``page_size`` consecutive slots. A full page is named by a hash chained over all tokens up to its end, and can be
shared by every sequence that starts with those tokens. A freed page keeps its name, and can be revived, until it is handed out
again; the page unused for longest goes first. Hash-chained pages are vLLM's idea; nano-vllm shows it at this size.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence as TokenSequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Allocation:
    """Pages of one sequence in order, and how many leading tokens of it are already computed in them."""

    pages: list[int]
    cached_tokens: int


class BlockManager:
    """Hands out pages by reference count; never holds a tensor.

    ``salt`` separates cache contents that must not be mixed (here: the weight version); a change of it, like ``flush``, makes
    every older page unfindable.
    """

    def __init__(self, *, num_pages: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.salt = ""
        self._refs = [0] * num_pages
        self._free: dict[int, None] = dict.fromkeys(range(num_pages))  # insertion order is eviction order
        self._page_of: dict[bytes, int] = {}
        self._name_of: dict[int, bytes] = {}

    @property
    def pages_in_use(self) -> int:
        """Pages that some sequence holds."""
        return self.num_pages - len(self._free)

    def pages_for(self, num_slots: int) -> int:
        """Pages that ``num_slots`` tokens take."""
        return -(-num_slots // self.page_size)

    def allocate(self, tokens: TokenSequence[int], *, num_slots: int, spare: int = 0) -> Allocation | None:
        """Pages for ``num_slots`` tokens starting with ``tokens``, sharing what is cached; None when too few are free.

        The last token is never taken from the cache, because its forward pass gives the next logits. ``spare`` pages must stay
        free. The new pages have no name until ``name``.
        """
        hits: list[int] = []
        for name in self._chain(tokens)[: (len(tokens) - 1) // self.page_size]:
            if name not in self._page_of:
                break
            hits.append(self._page_of[name])
        fresh_needed = self.pages_for(num_slots) - len(hits)
        if fresh_needed + spare > len(self._free) - sum(self._refs[p] == 0 for p in hits):
            return None
        self._hold(hits)
        return Allocation(pages=hits + self._take(fresh_needed), cached_tokens=len(hits) * self.page_size)

    def name(self, pages: TokenSequence[int], tokens: TokenSequence[int]) -> None:
        """Make the full pages of ``tokens`` findable: they are computed, or are in the forward about to run.

        In that forward a later sequence may already share them, since a layer writes the keys and values of the whole batch
        before any of its queries reads.
        """
        for page, name in zip(pages, self._chain(tokens), strict=False):  # pages past the last full one have no name
            if name not in self._page_of and page not in self._name_of:
                self._page_of[name] = page
                self._name_of[page] = name

    def grow(self, pages: list[int], *, num_slots: int) -> bool:
        """Add to ``pages`` what ``num_slots`` tokens need beyond them; False, and nothing added, when too few are free."""
        needed = max(0, self.pages_for(num_slots) - len(pages))
        if needed > len(self._free):
            return False
        pages += self._take(needed)
        return True

    def fork(self, pages: TokenSequence[int], *, prompt_length: int, num_slots: int) -> list[int] | None:
        """Pages for a copy of a sequence with the same prompt: full prompt pages shared, the rest fresh; None when too few."""
        shared = list(pages[: prompt_length // self.page_size])
        fresh_needed = self.pages_for(num_slots) - len(shared)
        if fresh_needed > len(self._free):
            return None
        self._hold(shared)
        return shared + self._take(fresh_needed)

    def release(self, pages: TokenSequence[int], *, tokens: TokenSequence[int] = ()) -> None:
        """Drop one reference to each of ``pages``; ``tokens`` are those computed in them, whose full pages become findable."""
        self.name(pages, tokens)
        for page in reversed(pages):  # a prefix outlives its continuation
            self._refs[page] -= 1
            if self._refs[page] == 0:
                self._free[page] = None

    def flush(self) -> None:
        """Forget what every page holds. Pages in use stay with their holders."""
        self._page_of.clear()
        self._name_of.clear()

    def _chain(self, tokens: TokenSequence[int]) -> list[bytes]:
        """Names of the full pages of ``tokens``: each hash covers the salt and all tokens up to the page's end."""
        names: list[bytes] = []
        data = np.asarray(tokens, dtype=np.int64)
        parent = self.salt.encode()
        for end in range(self.page_size, len(tokens) + 1, self.page_size):
            parent = hashlib.blake2b(parent + data[end - self.page_size : end].tobytes(), digest_size=16).digest()
            names.append(parent)
        return names

    def _hold(self, pages: TokenSequence[int]) -> None:
        for page in pages:
            self._refs[page] += 1
            self._free.pop(page, None)

    def _take(self, count: int) -> list[int]:
        taken: list[int] = []
        for _ in range(count):
            page = next(iter(self._free))
            del self._free[page]
            self._refs[page] = 1
            old = self._name_of.pop(page, None)
            if old is not None:
                del self._page_of[old]
            taken.append(page)
        return taken
