"""Parts and microbatches: nothing is lost or reordered, the cap is kept, and a slice's cuts depend on it alone."""

from __future__ import annotations

from hypothesis import given, strategies as st

from workers.trainer.packing import cut, pack

LENGTHS = st.lists(st.integers(1, 50), min_size=1, max_size=30)


def test_the_example_of_the_docstring() -> None:
    assert cut([3, 3, 4], 0, 3, 8) == [(0, 2), (2, 3)]
    assert cut([4, 4, 4, 4, 1], 0, 5, 8) == [(0, 2), (2, 4), (4, 5)]
    assert cut([4], 1, 1, 8) == []
    assert pack([6, 4, 5], lambda tokens: tokens, 8) == [[6], [4], [5]]
    assert pack([6, 4, 4], lambda tokens: tokens, 8) == [[6], [4, 4]]


@given(LENGTHS, st.integers(1, 60), st.data())
def test_cut_covers_in_order_within_the_cap(lengths: list[int], cap: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(lengths)))
    stop = data.draw(st.integers(start, len(lengths)))
    parts = cut(lengths, start, stop, cap)
    assert [i for a, b in parts for i in range(a, b)] == list(range(start, stop))
    for a, b in parts:
        assert sum(lengths[a:b]) <= cap or b == a + 1


@given(LENGTHS, st.integers(1, 60))
def test_cut_goes_on_from_its_own_points(lengths: list[int], cap: int) -> None:
    parts = cut(lengths, 0, len(lengths), cap)
    assert [part for a, b in parts for part in cut(lengths, a, b, cap)] == parts


@given(LENGTHS, st.integers(1, 60))
def test_pack_keeps_order_and_cap(tokens: list[int], cap: int) -> None:
    batches = pack(tokens, lambda n: n, cap)
    assert [n for batch in batches for n in batch] == tokens
    assert all(sum(batch) <= cap or len(batch) == 1 for batch in batches)
