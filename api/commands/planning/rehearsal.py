"""`weftd simulate --check`: the simulator beside the embedded service, with its tiny model in a temporary folder.

The simulated machine is calibrated on a few batches; then it predicts other loads, of one tenant and of several.
Occupancy is counted in decode steps, so it depends little on how fast the machine happens to be.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import Random

import weft
from sqlalchemy.orm import Session
from weft import types

from api.commands.changes import change
from api.commands.places import Place
from scheduler.simulator.calibration import Batch, calibrate
from scheduler.simulator.cluster import Cluster
from scheduler.simulator.simulation import Simulation
from scheduler.simulator.workloads import Workload
from store.people import keys, organisations

SLOTS = 8
TENANTS = 4
BASE_MODEL = "weft/tiny-moe"
#: For how many decode steps the loops run before counting begins, and for how many they are counted.
WARM_STEPS, COUNTED_STEPS = 100, 900
#: The same two stretches in seconds of the simulator's virtual clock.
PLAYED_WARM_S, PLAYED_S = 20.0, 600.0
#: If the generator has not reported after this time, it never will.
REPORTED_S = 240.0
#: How far a prediction may be off, as a share of the measured value.
TOLERANCE = 0.1
#: A case that is off is calibrated and measured again this often: other work on the machine disturbs both.
TRIES = 3

_LONG = Workload(
    "long answers", groups=8, group_size=1, prompt=3, mean_tokens=60, sigma=0.8, max_tokens=400, trains=False
)
_BRIEF = replace(_LONG, name="brief answers", groups=4, mean_tokens=40, max_tokens=160)
#: A workload to predict, and for how many tenants.
CASES = ((_LONG, 1), (_LONG, 3), (_BRIEF, 4))


@dataclass(frozen=True)
class Checked:
    load: str
    tenants: int
    tries: int
    measured: float
    predicted: float

    @property
    def off(self) -> float:
        return abs(self.predicted / self.measured - 1)

    @property
    def holds(self) -> bool:
        return self.off <= TOLERANCE


def check() -> Iterator[Checked]:
    """Yields every case as soon as it is known. Takes about a minute."""
    with _service() as clients:
        cluster = _calibrated(clients[0])
        for load, tenants in CASES:
            loads = [_drawn(load, seed) for seed in range(tenants)]
            for tries in range(1, TRIES + 1):
                if tries > 1:
                    cluster = _calibrated(clients[0])
                predicted = Simulation(cluster, loads).run(PLAYED_S, PLAYED_WARM_S).occupancy
                found = Checked(load.name, tenants, tries, _occupancy(clients, loads), predicted)
                if found.holds:
                    break
            yield found


def _drawn(load: Workload, seed: int) -> Workload:
    """The workload with fixed lengths, those of one step, again and again: the count must not depend on where it
    ends."""
    random = Random(seed)
    return replace(load, lengths=[load.sample(random, 0)[0] for _ in range(load.groups)])


class _Client:
    def __init__(self, service: weft.ServiceClient) -> None:
        self._sampler = service.create_sampling_client(base_model=BASE_MODEL).result()
        self._rest = service.create_rest_client()

    def batch(self, lengths: Sequence[int]) -> None:
        """Sequences of `steps` decode steps each, all sent at once; their first token comes with the prompt."""
        prompt = types.ModelInput.from_ints([40, 50, 60])
        params = [types.SamplingParams(max_tokens=length + 1, stop=[]) for length in lengths]
        for future in [self._sampler.sample(prompt, 1, of) for of in params]:
            future.result()

    def loop(self, load: Workload, over: threading.Event) -> None:
        while not over.is_set():
            self.batch(load.lengths)

    def steps(self) -> tuple[int, int]:
        """Decode steps so far, and the busy slots in them. The generator reports twice a second."""
        found = self._rest.get_stats().result().generator
        return found["steps"], found["slots_busy"]

    def past(self, steps: int, busy: int = 0) -> tuple[int, int]:
        """Wait until `steps` reports at least this many decode steps and busy slots, and return its report."""
        until_s = time.monotonic() + REPORTED_S
        while True:
            now = self.steps()
            if now[0] >= steps and now[1] >= busy:
                return now
            if time.monotonic() > until_s:
                raise RuntimeError(f"the generator reported {now} decode steps and busy slots, and not {steps, busy}")
            time.sleep(0.25)

    def timed(self, lengths: Sequence[int]) -> Batch:
        """Run one batch alone. Returns its time and its decode steps."""
        before, busy = self.steps()
        began_s = time.monotonic()
        self.batch(lengths)
        seconds = time.monotonic() - began_s
        after, _ = self.past(before, busy + sum(lengths))
        return Batch(lengths, seconds, after - before)


def _calibrated(client: _Client) -> Cluster:
    client.batch([50] * SLOTS)  # to warm up
    lone, burst = ([client.timed([0] * requests) for _ in range(9)] for requests in (1, SLOTS))
    return calibrate(
        SLOTS,
        one=client.timed([400]),
        full=client.timed([400] * SLOTS),
        lone=_median(lone),
        burst=_median(burst),
        queued=client.timed([16 + i % 32 for i in range(16 * SLOTS)]),
    )


def _median(batches: list[Batch]) -> Batch:
    return sorted(batches, key=lambda batch: batch.seconds)[len(batches) // 2]


def _occupancy(clients: Sequence[_Client], loads: Sequence[Workload]) -> float:
    """The share of busy slots, in the decode steps of a time in which all tenants' loops run."""
    over = threading.Event()
    threads = [
        threading.Thread(target=client.loop, args=(load, over)) for client, load in zip(clients, loads, strict=False)
    ]
    for thread in threads:
        thread.start()
    began, _ = clients[0].steps()
    before, busy_before = clients[0].past(began + WARM_STEPS)
    after, busy_after = clients[0].past(before + COUNTED_STEPS)
    over.set()
    for thread in threads:
        thread.join()
    return (busy_after - busy_before) / ((after - before) * SLOTS)


@contextmanager
def _service() -> Iterator[list[_Client]]:
    """An embedded service with few slots, and one client for each of its organisations."""
    with tempfile.TemporaryDirectory(prefix="weft-simulate-") as folder, ExitStack() as stack:
        config = Path(folder) / "weft.toml"
        config.write_text(f"[generator]\nslots = {SLOTS}\n")
        data_dir = Path(folder) / "data"
        with (Path(folder) / "log").open("w") as log:
            command = [sys.executable, "-m", "weft_server", "serve", "--port", "0"]
            server = subprocess.Popen(
                [*command, "--data-dir", str(data_dir), "--config", str(config)],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        stack.callback(server.wait, 60)
        stack.callback(server.terminate)
        assert server.stdout is not None
        ready = server.stdout.readline().split()
        if ready[:1] != ["ready"]:
            raise RuntimeError(f"the service did not start:\n{(Path(folder) / 'log').read_text()}")
        made = [change(Place(data_dir, config), partial(_key, f"tenant-{i}")) for i in range(TENANTS)]
        services = [stack.enter_context(weft.ServiceClient(base_url=ready[1], api_key=key)) for key in made]
        yield [_Client(service) for service in services]


def _key(organisation: str, session: Session) -> str:
    return keys.new_key(session, organisations.organisation_named(session, organisation).id)[1]
