"""Page accounting and prefix sharing."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_trace.rollout.embedded.block_manager import Allocation, BlockManager


def named(blocks: BlockManager, tokens: list[int], *, num_slots: int) -> Allocation | None:
    """Pages whose full ones are findable at once, as when their forward is scheduled."""
    allocation = blocks.allocate(tokens, num_slots=num_slots)
    if allocation is not None:
        blocks.name(allocation.pages, tokens)
    return allocation


def manager(num_pages: int = 8, page_size: int = 4) -> BlockManager:
    return BlockManager(num_pages=num_pages, page_size=page_size)


def test_pages_cover_the_slots_and_come_back() -> None:
    blocks = manager()
    first = named(blocks, [1, 2, 3], num_slots=9)
    assert len(first.pages) == 3 and first.cached_tokens == 0 and blocks.pages_in_use == 3
    assert named(blocks, [4], num_slots=21) is None and blocks.pages_in_use == 3
    blocks.release(first.pages)
    assert blocks.pages_in_use == 0
    assert sorted(named(blocks, [4], num_slots=32).pages) == list(range(8))


def test_a_shared_prefix_shares_full_pages_only() -> None:
    blocks = manager()
    first = named(blocks, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10], num_slots=12)
    second = named(blocks, [1, 2, 3, 4, 5, 6, 7, 8, 99], num_slots=12)
    assert second.cached_tokens == 8 and second.pages[:2] == first.pages[:2] and second.pages[2] != first.pages[2]
    third = named(blocks, [1, 2, 3, 4, 0, 6, 7, 8, 9], num_slots=12)
    assert third.cached_tokens == 4, "a page is named by all tokens before it, not by its own"
    blocks.release(first.pages)
    assert blocks.pages_in_use == 5
    blocks.release(second.pages)
    blocks.release(third.pages)
    assert blocks.pages_in_use == 0


def test_the_last_prompt_token_is_always_computed() -> None:
    blocks = manager()
    blocks.release(named(blocks, list(range(8)), num_slots=8).pages)
    assert named(blocks, list(range(8)), num_slots=8).cached_tokens == 4
    assert named(blocks, [*range(8), 5], num_slots=9).cached_tokens == 8


def test_released_pages_are_found_until_reused_oldest_first() -> None:
    blocks = manager(num_pages=4)
    old, new = named(blocks, [1, 1, 1, 1, 0], num_slots=8), named(blocks, [2, 2, 2, 2, 0], num_slots=8)
    blocks.release(old.pages)
    blocks.release(new.pages)
    assert named(blocks, [3], num_slots=8) is not None  # takes both pages of the oldest
    assert named(blocks, [2, 2, 2, 2, 9], num_slots=8).cached_tokens == 4
    assert blocks.pages_in_use == 4


def test_generated_tokens_become_a_prefix() -> None:
    blocks = manager()
    turn = named(blocks, [1, 2], num_slots=9)
    blocks.release(turn.pages, tokens=[1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert named(blocks, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10], num_slots=12).cached_tokens == 8


@pytest.mark.parametrize("change", ["flush", "salt"])
def test_flush_and_salt_make_old_pages_unfindable(change: str) -> None:
    blocks = manager()
    held = named(blocks, [1, 2, 3, 4, 5], num_slots=5)
    if change == "flush":
        blocks.flush()
    else:
        blocks.salt = "version 2"
    assert named(blocks, [1, 2, 3, 4, 5], num_slots=5).cached_tokens == 0
    assert len(held.pages) == 2 and blocks.pages_in_use == 4


def test_fork_shares_full_prompt_pages() -> None:
    blocks = manager()
    first = named(blocks, [1, 2, 3, 4, 5, 6], num_slots=12)
    fork = blocks.fork(first.pages, prompt_length=6, num_slots=12)
    assert fork[0] == first.pages[0] and not set(fork[1:]) & set(first.pages)
    assert blocks.fork(first.pages, prompt_length=6, num_slots=28) is None
    blocks.release(first.pages)
    assert blocks.pages_in_use == 3
    blocks.release(fork)
    assert blocks.pages_in_use == 0


def test_pages_are_unfindable_until_named_and_then_up_to_the_computed_token() -> None:
    blocks = manager(num_pages=16)
    first = blocks.allocate(list(range(12)), num_slots=12)
    assert blocks.allocate(list(range(12)), num_slots=12).cached_tokens == 0
    blocks.name(first.pages, list(range(7)))
    assert blocks.allocate(list(range(12)), num_slots=12).cached_tokens == 4


def test_growth_takes_a_page_at_a_time_and_leaves_spare_pages() -> None:
    blocks = manager(num_pages=3)
    held = blocks.allocate([1, 2, 3], num_slots=3).pages
    assert blocks.grow(held, num_slots=4) and len(held) == 1
    assert blocks.grow(held, num_slots=5) and len(held) == 2
    assert blocks.allocate([9], num_slots=1, spare=1) is None and blocks.pages_in_use == 2
    assert blocks.allocate([9], num_slots=1, spare=0) is not None
    assert not blocks.grow(held, num_slots=9) and len(held) == 2


@settings(max_examples=60)
@given(data=st.data())
def test_no_page_is_ever_shared_by_different_prefixes(data: st.DataObject) -> None:
    """Whatever the order of allocation and release: what a page holds is the prefix that its holder asked for."""
    blocks, held, content = manager(num_pages=6, page_size=2), [], {}
    for _ in range(data.draw(st.integers(1, 25))):
        if held and data.draw(st.booleans()):
            pages, tokens = held.pop(data.draw(st.integers(0, len(held) - 1)))
            blocks.release(pages, tokens=tokens)
            continue
        tokens = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=7))
        allocation = named(blocks, tokens, num_slots=len(tokens))
        if allocation is None:
            continue
        for i, page in enumerate(allocation.pages):
            prefix = tuple(tokens[: 2 * (i + 1)])
            if 2 * i < allocation.cached_tokens:
                assert content[page] == prefix
            else:
                assert all(page not in pages for pages, _ in held), "a fresh page is nobody's"
            content[page] = prefix
        held.append((allocation.pages, tokens))
        assert blocks.pages_in_use == len({p for pages, _ in held for p in pages})
    for pages, tokens in held:
        blocks.release(pages, tokens=tokens)
    assert blocks.pages_in_use == 0
