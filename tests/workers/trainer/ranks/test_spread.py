"""Which parts of operations go to which rank if ranks are not evenly busy."""

from __future__ import annotations

from hypothesis import given, strategies as st

from workers.trainer.ranks.spread import Move, Piece, spread

pieces = st.builds(
    Piece, st.sampled_from("abc"), st.integers(1, 9), st.booleans(), st.sampled_from([True, True, False]), st.booleans()
)


def part(op_id: str, tokens: int, *, movable: bool = True, uploaded: bool = False) -> Piece:
    return Piece(op_id, tokens, trains=True, movable=movable, uploaded=uploaded)


def test_the_end_of_the_largest_operation_goes() -> None:
    own = [part("small", 2), *[part("large", 4)] * 4]
    assert spread([own, [part("other", 2)]]) == [Move(0, 1, "large", 2, 4)]


def test_nothing_goes_that_does_not_make_ranks_more_equal() -> None:
    assert spread([[part("a", 8)], []]) == []
    assert spread([[part("a", 4, movable=False)] * 3, []]) == []


def test_uploaded_losses_go_to_rank_0() -> None:
    assert spread([[part("a", 9)], [part("b", 1, uploaded=True), part("c", 1)]]) == [Move(1, 0, "b", 0, 1)]


@given(st.lists(st.lists(pieces, max_size=8), min_size=2, max_size=4))
def test_what_goes_is_the_end_of_an_operation_and_movable(own: list[list[Piece]]) -> None:
    own = [
        [Piece(f"{p.op_id}{rank}{p.trains}{p.uploaded}", p.tokens, p.trains, p.movable, p.uploaded) for p in rank_own]
        for rank, rank_own in enumerate(own)
    ]
    moves = spread(own)
    for home, op_id in {(move.home, move.op_id) for move in moves}:
        mine = [piece for piece in own[home] if piece.op_id == op_id]
        ranges = [(move.first, move.stop) for move in moves if (move.home, move.op_id) == (home, op_id)]
        gone = [at for first, stop in ranges for at in range(first, stop)]
        assert gone == list(range(gone[0], len(mine)))
        assert all(mine[at].movable for at in gone)
    assert all(move.home != move.helper for move in moves)
    plain = [[piece for piece in rank_own if piece.trains and not piece.uploaded] for rank_own in own]
    assert largest(plain, spread(plain)) <= largest(plain, [])


def largest(own: list[list[Piece]], moves: list[Move]) -> int:
    loads = [sum(piece.tokens for piece in rank_own) for rank_own in own]
    for move in moves:
        of = [piece.tokens for piece in own[move.home] if piece.op_id == move.op_id][move.first : move.stop]
        loads[move.home] -= sum(of)
        loads[move.helper] += sum(of)
    return max(loads, default=0)
