"""Kill the parts of a real service while clients work, and measure what the clients see of it.

    python -m bench.chaos [--production | --idle] [--tree PATH] [--kills N] [--kinds WORD] [--json FILE]
    python -m bench.chaos --damage [--tree PATH] [--kinds WORD] [--json FILE]

Clients of the official SDK train and sample in cycles with the same answers each time; two calm cycles come first and
tell what the answers are. Then every kind of kill is done N times, in turns, and every answer is compared with the calm
one to the bit. The pause of a kill is the longest time that any client had no answer, less that client's usual gap. One
kill follows another when all clients work again, and a worker is not killed again within the 30 s in which its server
would wait longer and longer to start it. The tables of docs/recovery.md are made from its JSON (bench/figures.py).

--production: two API replicas, two trainers, two generators, PostgreSQL, Redis, an object store and no shared folder
    instead of one embedded server.
--idle: one client with one operation under way, on an embedded service that has nothing else to do.
--damage: fill the disk and damage files instead, one fresh service for each, and print who was told what.
--tree: the service of another checkout. The clients and this script are always those of this one.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.chaos import damage
from bench.chaos.idle import Pause, idle_pauses
from bench.chaos.load import Client, Sampler, Trainer
from bench.chaos.pauses import Calm, Kind, add_kill, compare, usual_gaps_s
from bench.chaos.service import HERE, Service, embedded, production
from bench.parts.results import machine

#: Seconds without a kill before the first: usual gaps are taken there.
QUIET_S = 8.0
#: A kill is over when each client has had this many answers since (more than were in flight), the last one within a
#: second.
ANSWERS_AFTER = 10
AT_LEAST_S, AT_MOST_S = 4.0, 180.0
#: Seconds between two kills of one kind.
SPACING_S = 35.0
THINK_S = 0.15
MISBILLED = """
select (select count(*) from (
  select 1 from usage_events where operation_id is not null group by operation_id, kind having count(*) > 1) as twice)
+ (select count(*) from operations where kind = 'forward_backward' and state = 'done'
   and id not in (select operation_id from usage_events where operation_id is not null))
"""


def clients_of(service: Service, **options: Any) -> list[Client]:
    """The clients: three that train and two that sample, of two organisations."""
    names = [("trainer", 1), ("trainer", 2), ("trainer", 3), ("sampler", 4), ("sampler", 5)]
    found: list[Client] = []
    for number, (role, seed) in enumerate(names):
        where = (f"{role} {seed}", service.url(number), service.key("acme" if number % 2 else "rival"), seed)
        found.append(Trainer(*where, **options) if role == "trainer" else Sampler(*where, adapter=seed == 5, **options))
    return found


def calm_answers(service: Service) -> dict[tuple[str, int], str]:
    """The answers of two cycles of each client, which must be the same."""
    clients = clients_of(service, cycles=2)
    for client in clients:
        client.start()
    calm: dict[tuple[str, int], str] = {}
    for client in clients:
        client.join()
        for answer in client.answers:
            if answer.failed or calm.setdefault((client.name, answer.place), answer.value) != answer.value:
                raise RuntimeError(f"without any kill, {client.name} had {answer}\n{service.log()}")
    return calm


def shake(service: Service, kills: int, only: str) -> list[Kind]:
    calm = calm_answers(service)
    clients = clients_of(service, think_s=THINK_S)
    for client in clients:
        client.start()
    started = time.monotonic()
    settled(clients, started)
    time.sleep(QUIET_S)
    usual_s = usual_gaps_s({client.name: list(client.answers) for client in clients})
    kinds = {name: Kind(name) for name in service.kinds if only in name}
    say(f"calm: {len(calm)} answers, usual gaps {', '.join(f'{gap:.3f}' for gap in usual_s.values())} s")
    last: dict[str, float] = {}
    misbilled = service.count(MISBILLED)
    for _ in range(kills):
        for name, kind in kinds.items():
            time.sleep(max(0.0, last.get(name, 0.0) + SPACING_S - time.monotonic()))
            last[name] = time.monotonic()
            strike(service, kind, clients, calm, usual_s)
            kind.misbilled += (now := service.count(MISBILLED)) - misbilled
            misbilled = now
    end = finish(clients)
    return [*kinds.values(), rest(clients, calm, [*kinds.values()], started, end)]


def strike(service: Service, kind: Kind, clients: Sequence[Client], calm: Calm, usual_s: dict[str, float]) -> None:
    start = time.monotonic()
    service.kinds[kind.name]()
    back = settled(clients, start)
    answers = {client.name: list(client.answers) for client in clients}
    before = len(kind.errors)
    add_kill(kind, answers, calm, usual_s, start, time.monotonic())
    say(f"{kind.name}: {kind.pauses_s[-1]:.1f} s" + ("" if back else ", and not all clients came back"))
    for error in kind.errors[before:]:
        say(f"    {error}")


def settled(clients: Sequence[Client], since: float) -> bool:
    """Wait until all clients work again; returns False if they do not."""
    deadline = since + AT_MOST_S
    while (now := time.monotonic()) < deadline:
        good = [[answer.at for answer in list(client.answers) if not answer.failed] for client in clients]
        works = [sum(at > since for at in times) >= ANSWERS_AFTER and times[-1] > now - 1 for times in good]
        if all(works) and now > since + AT_LEAST_S:
            return True
        time.sleep(0.1)
    return False


def finish(clients: Sequence[Client]) -> float:
    for client in clients:
        client.stop()
    for client in clients:
        client.join()
    return time.monotonic()


def rest(clients: Sequence[Client], calm: Calm, kinds: Sequence[Kind], start: float, end: float) -> Kind:
    """Answers that came between the kills, when nothing was wrong."""
    all_of_it = Kind("nothing (between the kills)")
    for client in clients:
        compare(all_of_it, client.name, client.answers, calm, start, end)
    all_of_it.answers -= sum(kind.answers for kind in kinds)
    all_of_it.differences -= sum(kind.differences for kind in kinds)
    all_of_it.errors = all_of_it.errors[sum(len(kind.errors) for kind in kinds) :]
    return all_of_it


def say(line: str) -> None:
    print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="bench.chaos", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--production", action="store_true")
    parser.add_argument("--idle", action="store_true")
    parser.add_argument("--damage", action="store_true")
    parser.add_argument("--tree", type=Path, default=HERE)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--kinds", default="", metavar="WORD", help="only kinds with this in their name")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, not to stdout")
    arguments = parser.parse_args()
    started, load = time.monotonic(), os.getloadavg()[0]
    what = next((name for name in ("damage", "idle", "production") if getattr(arguments, name)), "embedded")
    with tempfile.TemporaryDirectory(prefix="weft-chaos-") as folder:
        os.chmod(folder, 0o755)
        found = measured(what, arguments, Path(folder))
    command = shlex.join(["python", "-m", "bench.chaos", *sys.argv[1:]])
    result = {
        "bench": f"chaos-{what}",
        "machine": machine() | {"command": command, "load": load},
        "seconds": time.monotonic() - started,
        "found": [asdict(each) for each in found],
    }
    written = json.dumps(result, indent=2) + "\n"
    if arguments.json is None:
        say(written)
    else:
        arguments.json.write_text(written)


def measured(what: str, arguments: argparse.Namespace, folder: Path) -> Sequence[Pause | Kind | damage.Finding]:
    tree, kills, only = arguments.tree.absolute(), arguments.kills, arguments.kinds
    if what == "damage":
        return damage.all_of(tree, folder, only)
    if what == "idle":
        with embedded(tree, folder) as service:
            return idle_pauses(service, kills, only)
    with (production if what == "production" else embedded)(tree, folder) as harmed:
        return shake(harmed, kills, only)


if __name__ == "__main__":
    main()
