"""`python -m tests.truth.soak --minutes M | --operations N [--seed S]`: random programs without end.

Prints what it plays and every difference it finds, made small, as a plain test to paste into tests/truth/found/; leaves
them in `--out` as well. Exit code 1 if there was any. `--planted` shows instead that each fault of planted.py is found,
or each that is named behind it.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.truth.planted import PLANTED
from tests.truth.search import Bench, Failure, search
from tests.truth.world import Ground

#: Programs between two lines of progress.
ROUND = 25


def main(argv: Sequence[str] | None = None) -> int:
    args = _arguments(argv)
    with tempfile.TemporaryDirectory(prefix="weft-truth-") as folder:
        bench = Bench(Ground(Path(folder) / "ground"), Path(folder))
        if args.planted is not None:
            return planted(bench, args.planted or list(PLANTED))
        seed = args.seed if args.seed is not None else random.SystemRandom().randrange(10**9)
        return soak(bench, seed, args)


def soak(bench: Bench, seed: int, args: argparse.Namespace) -> int:
    began = time.monotonic()
    until_s = began + 60 * args.minutes if args.minutes else None
    found: list[Failure] = []
    number = said = seed
    while _goes_on(bench, until_s, args.operations):
        failure = search(bench, [number], faults=not args.no_faults, tries=args.tries)
        number += 1
        if failure is not None:
            found.append(failure)
            _keep(failure, args.out)
        if number - said == ROUND or failure is not None:
            said = number
            minutes = (time.monotonic() - began) / 60
            print(f"{minutes:6.1f} min  {bench.brief()}, {len(found)} differences; next: {number}", flush=True)
    print(bench.report())
    print(f"programs {seed} to {number - 1}, {len(found)} differences: {[failure.number for failure in found]}")
    return 1 if found else 0


def _goes_on(bench: Bench, until_s: float | None, operations: int) -> bool:
    if until_s is not None:
        return time.monotonic() < until_s
    return bench.statistics["operations"] < operations


def _keep(failure: Failure, out: Path | None) -> None:
    text = failure.as_test()
    print(f"\nDIFFERENCE in program {failure.number}:\n{failure.what}\n{text}", flush=True)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / f"number_{failure.number}.py").write_text(text)


def planted(bench: Bench, names: Sequence[str]) -> int:
    """Check that each planted fault is found by one of the first hundred programs."""
    missed = 0
    for name in names:
        plant = PLANTED[name]
        own = Bench(bench.ground, bench.folder / name.replace(" ", "-"))
        began = time.monotonic()
        failure = search(own, range(100), faults=False, tries=0, plant=plant)
        missed += failure is None
        verdict = f"found by program {failure.number}" if failure is not None else "NOT FOUND"
        line = f"{name}: {verdict} after {own.statistics['programs']} programs, {time.monotonic() - began:.0f} s"
        print(f"{line}: {failure.what.splitlines()[0][:160]}" if failure is not None else line, flush=True)
    return 1 if missed else 0


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.truth.soak", description=(__doc__ or "").splitlines()[0])
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--minutes", type=float, default=0.0, help="how long")
    length.add_argument("--operations", type=int, default=10_000, help="how many operations, in all plays")
    parser.add_argument("--seed", type=int, help="number of the first program; the next ones count on")
    parser.add_argument("--out", type=Path, help="a folder for what is found")
    parser.add_argument("--tries", type=int, default=150, help="how often a difference is tried to be made smaller")
    parser.add_argument("--no-faults", action="store_true", help="deaths only: disks and databases always work")
    parser.add_argument(
        "--planted",
        nargs="*",
        choices=PLANTED,
        metavar="FAULT",
        help="show that planted faults are found: all, or these",
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
