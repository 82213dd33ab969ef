"""`make mutants`: puts small faults (cosmic-ray's) into the modules that guard money, isolation and fairness, one at a
time, and runs their tests. A fault that no test notices is printed as a diff: it wants a test, or a line in
docs/mutants.md that says why it changes nothing.

    .mutants/bin/python -m tools.mutants [MODULE[:LINE,LINE...]...]

Runs in an environment of its own, on a copy of the files that git knows; a fault takes a second if nothing else runs.
With lines, only the faults that begin there: for who has added a test.
"""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from cosmic_ray.work_db import WorkDB, use_db
from cosmic_ray.work_item import WorkerOutcome, WorkResult

CHECKOUT = Path(__file__).parents[1]
#: Seconds for one run of a module's tests, which usually takes seconds; a fault that makes it last longer counts as
#: noticed.
LIMIT_S = 60

#: The modules, and the tests that are to notice: those which are meant for them, not all that happen to run through.
#: Pure ones need no fixtures, and so no conftest, which takes longer to import than they to run.
MODULES: dict[str, tuple[str, ...]] = {
    "api/http/access.py": (
        "tests/tenancy/test_routes.py",
        *("--deselect", "tests/tenancy/test_routes.py::test_every_role_against_every_route"),
        *("tests/tenancy/test_limits.py::test_requests_per_minute_of_an_organisation", "tests/api/test_bodies.py"),
    ),
    "api/http/auth.py": (
        *("tests/api/test_auth.py", "tests/api/test_tokens.py", "tests/tenancy/test_keys.py"),
        *("tests/tenancy/test_ended.py", "tests/tenancy/test_audit.py"),
    ),
    "api/http/direct.py": ("tests/api/test_direct.py",),
    "api/operations/paying.py": ("tests/api/test_quotas.py", "tests/tenancy/test_out_of_money.py"),
    "api/operations/submit.py": (
        *("tests/api/test_training.py", "tests/api/test_quotas.py", "tests/api/test_money.py"),
        "tests/tenancy/test_limits.py",
    ),
    "api/state/large_bodies.py": ("tests/api/test_bodies.py",),
    "api/state/polls.py": ("tests/api/test_polls.py",),
    "api/state/rates.py": ("tests/tenancy/test_limits.py",),
    "api/state/threads.py": ("tests/api/test_threads.py",),
    "api/who/reach.py": ("--noconftest", "tests/api/test_reach.py"),
    "api/who/credentials.py": ("tests/api/who/test_credentials.py",),
    "api/who/lookup.py": ("tests/api/who/test_lookup.py",),
    "api/who/may_change.py": ("tests/api/who/test_may_change.py",),
    "api/who/principal.py": ("tests/api/who/test_principal.py",),
    "api/who/signing.py": ("--noconftest", "tests/api/test_signing.py"),
    "api/who/tokens.py": ("tests/api/test_tokens.py", "--deselect", "tests/api/test_tokens.py::TestOverHttp"),
    "billing/money/accounts.py": (
        *("tests/billing/money/test_budgets.py", "tests/billing/metering/test_charges.py"),
        *("--deselect", "tests/billing/metering/test_charges.py::test_a_summary_is_the_sum_of_first_endings"),
    ),
    "billing/metering/charges.py": (
        "tests/billing/metering/test_charges.py",
        "tests/billing/money/test_hard_limits.py::test_a_commit_that_fails_moves_nothing",
    ),
    "billing/metering/quotas.py": ("tests/billing/metering/test_quotas.py",),
    "billing/metering/storage.py": (
        *("tests/billing/metering/test_storage.py", "tests/billing/metering/test_storage_of_samplers.py"),
    ),
    "billing/money/budgets.py": ("tests/billing/money/test_budgets.py",),
    "billing/money/grants.py": ("tests/billing/money/test_budgets.py", "tests/billing/metering/test_charges.py"),
    "billing/money/ledger.py": ("tests/billing/money/test_ledger.py",),
    "billing/money/wallets.py": (
        *("tests/billing/money/test_wallet_defaults.py", "tests/billing/metering/test_charges.py::TestModes"),
        *("--deselect", "tests/billing/money/test_wallet_defaults.py::test_two_servers_store_the_defaults_at_once"),
    ),
    "billing/prices.py": ("--noconftest", "tests/billing/test_prices.py"),
    "billing/reports/reconcile.py": ("tests/billing/reports/test_reconcile.py",),
    "billing/reports/spending.py": ("tests/billing/reports/test_spending.py",),
    "client_sdk/weft/rl/loops/batch.py": ("--noconftest", "tests/client_sdk/rl/test_batch.py"),
    "client_sdk/weft/rl/loops/checkpoint.py": ("--noconftest", "tests/client_sdk/rl/test_checkpoints.py"),
    "client_sdk/weft/rl/loops/distill.py": ("--noconftest", "tests/client_sdk/rl/test_train.py"),
    "client_sdk/weft/rl/loops/estimate.py": ("--noconftest", "tests/client_sdk/rl/test_estimate.py"),
    "client_sdk/weft/rl/loops/evaluate.py": (
        *("--noconftest", "tests/client_sdk/rl/test_evaluate.py", "tests/client_sdk/rl/test_rollouts.py"),
        *("tests/client_sdk/rl/test_refused.py", "tests/client_sdk/rl/test_checks.py"),
        *("--deselect", "tests/client_sdk/rl/test_evaluate.py::test_tasks_wait_for_a_place"),
    ),
    "client_sdk/weft/rl/loops/failures.py": ("--noconftest", "tests/client_sdk/rl/test_failures.py"),
    "client_sdk/weft/rl/loops/mixture.py": ("--noconftest", "tests/client_sdk/rl/test_mixture.py"),
    "client_sdk/weft/rl/loops/money.py": (
        *("--noconftest", "tests/client_sdk/rl/test_money.py", "tests/client_sdk/rl/test_supervised.py"),
    ),
    "client_sdk/weft/rl/loops/rate.py": (
        *("--noconftest", "tests/client_sdk/rl/test_rate.py", "tests/client_sdk/rl/test_checks.py"),
    ),
    "client_sdk/weft/rl/loops/rollouts.py": (
        *("--noconftest", "tests/client_sdk/rl/test_rollouts.py", "tests/client_sdk/rl/test_in_flight.py"),
        *("tests/client_sdk/rl/test_train.py", "tests/client_sdk/rl/test_refused.py"),
    ),
    "client_sdk/weft/rl/loops/sinks.py": ("--noconftest", "tests/client_sdk/rl/test_sinks.py"),
    "client_sdk/weft/rl/loops/train.py": (
        *("--noconftest", "tests/client_sdk/rl/test_train.py", "tests/client_sdk/rl/test_checks.py"),
    ),
    "client_sdk/weft/rl/losses/loss.py": (
        *("--noconftest", "tests/workers/trainer/test_rl_losses.py", "tests/client_sdk/rl/test_rollout.py"),
        *("tests/client_sdk/rl/test_batch.py", "tests/client_sdk/rl/test_checks.py"),
    ),
    "client_sdk/weft/rl/losses/traced.py": (
        *("--noconftest", "tests/workers/trainer/test_rl_losses.py", "tests/client_sdk/rl/test_checks.py"),
    ),
    "client_sdk/weft/rl/supervised/dpo.py": (
        *("--noconftest", "tests/client_sdk/rl/test_dpo.py", "tests/client_sdk/rl/test_render.py"),
    ),
    "client_sdk/weft/rl/supervised/loop.py": (
        *("--noconftest", "tests/client_sdk/rl/test_supervised.py", "tests/client_sdk/rl/test_dpo.py"),
        *("tests/client_sdk/rl/test_refused.py", "tests/client_sdk/rl/test_checks.py"),
    ),
    "scheduler/jobs/reaper.py": ("tests/scheduler/jobs/test_reaper.py",),
    "scheduler/journal/accepting/acceptance.py": (
        *("tests/scheduler/journal/accepting/test_acceptance.py", "tests/scheduler/journal/test_small_bodies.py"),
        *("tests/scheduler/journal/test_journal.py", "tests/scheduler/journal/test_database_away.py", "-k"),
        "acceptance or number or moment or restart or refused or small or bodies or twice or was_stored or rows_that",
    ),
    "scheduler/journal/accepting/admission.py": (
        *("tests/scheduler/journal/test_journal.py", "tests/scheduler/journal/test_closed_runs.py"),
    ),
    "scheduler/journal/accepting/backlog.py": (
        *("--noconftest", "tests/scheduler/journal/accepting/test_backlog.py"),
        "--deselect",
        "tests/scheduler/journal/accepting/test_backlog.py::test_what_is_queued_counts_as_before_after_a_restart",
    ),
    "scheduler/journal/accepting/numbers.py": ("tests/scheduler/journal/accepting/test_numbers.py",),
    "scheduler/journal/ending/completions.py": ("--noconftest", "tests/scheduler/journal/ending/test_completions.py"),
    "scheduler/journal/ending/outcomes.py": ("tests/scheduler/journal/ending/test_outcomes.py",),
    "scheduler/journal/ending/references.py": (
        *("tests/scheduler/journal/ending/test_references.py", "tests/scheduler/jobs/test_reaper.py"),
    ),
    "scheduler/journal/ending/results.py": ("tests/scheduler/journal/ending/test_results.py",),
    "scheduler/journal/ending/settlement.py": (
        *("tests/scheduler/journal/ending/test_settlement.py", "tests/scheduler/journal/ending/test_made.py"),
    ),
    "scheduler/order/compose.py": ("--noconftest", "tests/scheduler/order/test_compose.py"),
    "scheduler/order/expected_cost.py": ("--noconftest", "tests/scheduler/order/test_expected_cost.py"),
    "scheduler/order/fair.py": (
        *("--noconftest", "tests/scheduler/order/test_fair.py", "tests/scheduler/order/test_fair_plain.py"),
    ),
    "scheduler/order/gradients.py": ("--noconftest", "tests/scheduler/order/test_gradients.py"),
    "scheduler/order/homes.py": (
        *("--noconftest", "tests/scheduler/order/test_homes.py"),
        *("--deselect", "tests/scheduler/order/test_homes.py::test_equal_clients_are_split_evenly_wherever_they_begin"),
        "--deselect",
        "tests/scheduler/order/test_homes.py::test_uneven_clients_end_where_neither_move_nor_exchange_evens_much_out",
    ),
    "scheduler/order/lanes.py": ("--noconftest", "tests/scheduler/order/test_lanes.py"),
    "scheduler/order/light_work.py": ("--noconftest", "tests/scheduler/order/test_light_work.py"),
    "store/blobs/bucket.py": ("tests/store/blobs/test_bucket.py", "tests/store/blobs/test_contract.py"),
    "store/blobs/cache.py": ("tests/store/blobs/test_cache.py",),
    "store/blobs/folder.py": ("tests/store/blobs/test_contract.py",),
    "store/blobs/objects.py": ("tests/store/blobs/test_contract.py",),
    "store/blobs/room.py": ("--noconftest", "tests/store/blobs/test_room.py"),
    "store/database/bulk.py": (
        *("-k", "", "tests/store/database/test_bulk.py", "tests/scheduler/journal/test_statements.py"),
    ),
    "store/database/caller.py": (*("-k", "", "tests/tenancy/test_row_security.py", "tests/tenancy/test_audit.py"),),
    "store/database/row_security.py": (*("-k", "", "tests/tenancy/test_row_security.py"),),
    "store/people/keys.py": ("tests/store/people/test_keys.py",),
    "store/people/roles.py": ("tests/tenancy/test_routes.py",),
    "workers/model/adapters/adapter.py": ("--noconftest", "tests/workers/model/adapters/test_adapter.py"),
    "workers/model/adapters/peft_format.py": (
        *("tests/workers/model/adapters/test_peft_format.py", "tests/workers/model/adapters/test_parted.py"),
    ),
    "workers/model/adapters/peft_reading.py": (
        *("tests/workers/model/adapters/test_peft_format.py", "tests/workers/model/adapters/test_parted.py"),
    ),
    "workers/model/adapters/shape.py": (
        *("tests/workers/model/adapters/test_adapter.py", "tests/workers/model/adapters/test_peft_format.py"),
    ),
    "workers/model/isolation.py": (
        *("--noconftest", "tests/workers/model/test_probe.py", "tests/workers/model/test_probe_rows.py"),
    ),
    "workers/trainer/packing.py": ("--noconftest", "tests/workers/trainer/test_packing.py"),
    "workers/trainer/runs/pages.py": ("--noconftest", "tests/workers/trainer/test_pages.py"),
    "workers/trainer/steps/adamw.py": (
        *("tests/workers/trainer/test_optimizer.py", "tests/workers/trainer/test_answered.py"),
        "tests/workers/trainer/test_short_steps.py",
    ),
    "workers/trainer/steps/dimuon.py": (
        *("tests/workers/trainer/test_dimuon.py", "tests/workers/trainer/test_short_steps.py"),
    ),
}

#: The client that asks `tools.warm` for a run.
_ASK = "import socket, sys; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); sys.exit(s.recv(1) != b'0')"


def main(wanted: list[str]) -> int:
    """Print the surviving faults of each module; returns 1 if there are any."""
    modules = {name: lines for name, _, lines in (each.partition(":") for each in wanted or MODULES)}
    if unknown := modules.keys() - MODULES.keys():
        print(f"no such module here: {', '.join(sorted(unknown))}; there are {', '.join(MODULES)}", file=sys.stderr)
        return 2
    survived = 0
    for module, lines in modules.items():
        with tempfile.TemporaryDirectory(prefix="weft-mutants-") as folder:
            survived += try_module(module, Path(folder), frozenset(map(int, filter(None, lines.split(",")))))
    return int(survived > 0)


def try_module(module: str, folder: Path, lines: frozenset[int]) -> int:
    """How many faults of a module, or of these lines of it, its tests do not notice."""
    tree, session = folder / "tree", folder / "session.sqlite"
    copy_checkout(tree)
    config = folder / "config.toml"
    with warm(module, tree, folder / "socket") as command:
        config.write_text(
            f'[cosmic-ray]\nmodule-path = "{module}"\ntimeout = {LIMIT_S}\nexcluded-modules = []\n'
            f"test-command = '''{command}'''\n[cosmic-ray.distributor]\nname = \"local\"\n"
        )
        _cosmic_ray(tree, "--verbosity", "ERROR", "baseline", str(config))
        _cosmic_ray(tree, "init", str(config), str(session))
        with use_db(str(session), WorkDB.Mode.open) as database:
            skip_annotations(database, tree / module)
            if lines:
                skip(database, lambda at: at[0] not in lines)
        _cosmic_ray(tree, "exec", str(config), str(session))
    with use_db(str(session), WorkDB.Mode.open) as database:
        return report(module, database)


@contextmanager
def warm(module: str, tree: Path, at: Path) -> Iterator[str]:
    """A command that runs a module's tests in `tree`, by `tools.warm`."""
    tests = (
        "-x",
        "-q",
        "-p",
        "no:xdist",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:warnings",
        f"--basetemp={at}.tmp",
        "-k",
        "not postgresql",
    )
    python = str(CHECKOUT / ".venv/bin/python")
    # One thread: what is forked from a process with more may hang.
    few = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1") | {"PYTHONPATH": f"{tree}:{tree}/client_sdk"}
    command = [python, "-m", "tools.warm", str(at), module, *tests, *MODULES[module]]
    server = subprocess.Popen(command, cwd=tree, env=os.environ | few)
    try:
        while not at.exists():
            if server.poll() is not None:
                raise SystemExit(f"{module}: its tests fail as it is")
            time.sleep(0.1)
        yield f'{sys.executable} -Sc "{_ASK}" {at}'
        if server.poll() is not None:
            raise SystemExit(f"{module}: what runs its tests has died, and since then every fault looks noticed")
    finally:
        server.kill()
        server.wait()


def copy_checkout(into: Path) -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=CHECKOUT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (CHECKOUT / name).is_file():
            (into / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(CHECKOUT / name, into / name)


def skip_annotations(database: WorkDB, file: Path) -> None:
    """Skip faults in annotations: these are only text here (`from __future__ import annotations`)."""
    annotations: list[ast.expr] = []
    for node in ast.walk(ast.parse(file.read_text())):
        for name in ("annotation", "returns"):
            if isinstance(found := getattr(node, name, None), ast.expr):
                annotations.append(found)
    skip(
        database, lambda at: any((a.lineno, a.col_offset) <= at < (a.end_lineno, a.end_col_offset) for a in annotations)
    )


def skip(database: WorkDB, chosen: Callable[[tuple[int, int]], bool]) -> None:
    """Skip the faults that begin at a `chosen` (line, column)."""
    for item in database.work_items:
        (mutation,) = item.mutations
        if chosen(mutation.start_pos):
            database.set_result(item.job_id, WorkResult(WorkerOutcome.SKIPPED))


def report(module: str, database: WorkDB) -> int:
    survivors = [result for _, result in database.results if result.is_killed is False]
    ends = Counter("skipped" if r.test_outcome is None else r.test_outcome.value for _, r in database.results)
    print(f"{module}: {', '.join(f'{count} {end}' for end, count in sorted(ends.items()))}", flush=True)
    real = [result for result in survivors if result.worker_outcome is WorkerOutcome.NORMAL]
    for result in real:
        print(result.diff, flush=True)
    return len(real)


def _cosmic_ray(tree: Path, *arguments: str) -> None:
    subprocess.run([str(Path(sys.executable).with_name("cosmic-ray")), *arguments], cwd=tree, check=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
