"""Which parts of which operations are computed on another rank than their run's home.

Rule: a rank has its fair share when it computes no more tokens than all ranks do on average. What is beyond it goes to
the rank with the least, from the end of the largest operation, as long as that makes the two more equal. What goes of
an operation is always its end, so that its gradient begins at home and the others' are added behind it, in the order of
its data. Example, two ranks: A has parts of 4, 4, 4 and 4 tokens of one operation, B one of 2. The share is 9: A's last
part goes (12, 6), then one more would make it (8, 10), which is less than 12: it goes too.

Every rank comes to the same plan from the same pieces; forwards and forward_backwards are spread by themselves, because
they are computed in different steps. Before that, what has an uploaded loss goes to rank 0, whatever the balance: only
rank 0 can tell the server at once whose loss it is about to compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Piece:
    """One part as other ranks see it. `movable`: its sums have the same bits if they begin with zero on another rank.
    `uploaded`: its loss is an uploaded one."""

    op_id: str
    tokens: int
    trains: bool
    movable: bool
    uploaded: bool = False


@dataclass(frozen=True)
class Move:
    """Pieces first:stop of the operation `op_id` (counted among its own) go from `home` to `helper`."""

    home: int
    helper: int
    op_id: str
    first: int
    stop: int


def spread(pieces: Sequence[Sequence[Piece]]) -> list[Move]:
    """The moves for the `pieces` of each rank, of each operation in the order of its data."""
    moves = []
    for trains in (False, True):
        moves += _joined(_spread([[piece for piece in own if piece.trains is trains] for own in pieces]))
    return moves


def _spread(pieces: Sequence[Sequence[Piece]]) -> list[Move]:
    """Decide which pieces go to other ranks: moves of one piece each."""
    loads = [sum(piece.tokens for piece in own) for own in pieces]
    moves: list[Move] = []
    left = [_by_op(own) for own in pieces]

    def move(home: int, helper: int, op_id: str) -> None:
        piece = left[home][op_id].pop()
        at = len(left[home][op_id])
        moves.append(Move(home, helper, op_id, at, at + 1))
        loads[home] -= piece.tokens
        loads[helper] += piece.tokens

    for home in range(1, len(pieces)):
        for op_id, own in left[home].items():
            while own and own[-1].movable and own[-1].uploaded:
                move(home, 0, op_id)
    for home in sorted(range(len(pieces)), key=lambda rank: -loads[rank]):
        while loads[home] * len(loads) > sum(loads):
            helper = min(range(len(loads)), key=loads.__getitem__)
            room = loads[home] - loads[helper]
            ends = [op for op, own in left[home].items() if own and _may_go(own[-1], room)]
            if not ends:
                break
            move(home, helper, max(ends, key=lambda op: sum(piece.tokens for piece in left[home][op])))
    return moves


def _by_op(pieces: Sequence[Piece]) -> dict[str, list[Piece]]:
    found: dict[str, list[Piece]] = {}
    for piece in pieces:
        found.setdefault(piece.op_id, []).append(piece)
    return found


def _may_go(piece: Piece, room: int) -> bool:
    return piece.movable and not piece.uploaded and 0 < piece.tokens < room


def _joined(moves: Sequence[Move]) -> list[Move]:
    """The same in the order of the data, with neighbours that go to the same rank as one."""
    joined: list[Move] = []
    for move in sorted(moves, key=lambda move: (move.home, move.op_id, move.first)):
        last = joined[-1] if joined else None
        if last is not None and (last.home, last.helper, last.op_id, last.stop) == (
            move.home,
            move.helper,
            move.op_id,
            move.first,
        ):
            joined[-1] = Move(last.home, last.helper, last.op_id, last.first, move.stop)
        else:
            joined.append(move)
    return joined
