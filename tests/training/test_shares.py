from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from lopsided.training.batches import cut

Size = st.integers(1, 60)


@settings(max_examples=300, deadline=None)
@given(num=Size, ranks=st.integers(1, 5), chunk_size=st.none() | st.integers(2, 20), least=st.integers(1, 2))
def test_every_row_is_in_one_share_and_chunks_do_not_depend_on_the_ranks(
    num: int, ranks: int, chunk_size: int | None, least: int
) -> None:
    rows = np.arange(100, 100 + num)
    batch = cut(rows, ranks, chunk_size=chunk_size, least=least)
    assert sorted(rows[batch.order].tolist()) == rows.tolist()
    assert batch.sizes == [len(batch.positions(rank)) for rank in range(ranks)]
    whole = [(shares[0].start, shares[-1].stop) for shares in batch.chunks]
    assert whole == [(one.start, one.stop) for (one,) in cut(rows, 1, chunk_size=chunk_size).chunks]
    assert np.concatenate([np.arange(*chunk) for chunk in whole]).tolist() == list(range(num))


@settings(max_examples=300, deadline=None)
@given(num=st.integers(2, 200), chunk_size=st.integers(2, 50))
def test_chunks_are_equal_and_within_their_size_and_never_of_one_row(num: int, chunk_size: int) -> None:
    sizes = [shares[0].stop - shares[0].start for shares in cut(np.arange(num), chunk_size=chunk_size).chunks]
    assert min(sizes) >= 2
    assert max(sizes) - min(sizes) <= 1
    assert max(sizes) <= max(chunk_size, 3)


@settings(max_examples=200, deadline=None)
@given(num=Size, ranks=st.integers(1, 6), least=st.integers(1, 3))
def test_shares_are_equal_and_those_that_cannot_have_the_least_are_empty(num: int, ranks: int, least: int) -> None:
    sizes = cut(np.arange(num), ranks, least=least).sizes
    filled = [size for size in sizes if size]
    assert sizes[: len(filled)] == filled
    assert max(filled) - min(filled) <= 1
    assert min(filled) >= min(least, num)
    assert len(filled) == min(ranks, max(num // least, 1))


@settings(max_examples=300, deadline=None)
@given(num=st.integers(2, 200), ranks=st.integers(1, 6), chunk_size=st.integers(2, 20))
def test_over_all_chunks_no_rank_has_more_than_a_row_more_than_another(num: int, ranks: int, chunk_size: int) -> None:
    batch = cut(np.arange(num), ranks, chunk_size=chunk_size)
    assert max(batch.sizes) - min(batch.sizes) <= 1
    assert batch.chunks[0][0].stop > batch.chunks[0][0].start


def test_chunks_that_not_all_ranks_can_share_go_to_each_in_turn() -> None:
    batch = cut(np.arange(24), 4, chunk_size=3, least=2)
    assert batch.sizes == [6, 6, 6, 6]
