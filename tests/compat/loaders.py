"""How stock transformers and PEFT load a downloaded adapter, by version: `python -m tests.compat.loaders`.

Each pair of versions loads it in an environment of its own, by the folder's own verify.py. Writes
`tests/compat/loaders.json`, of which `tests.compat.page` makes a table."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from tests.compat.environments import environment
from tests.e2e.conftest import BASE_MODEL, BIN, Weftd
from workers.model.tiny import TINY_PATH

RESULTS = Path(__file__).with_name("loaders.json")
TRANSFORMERS = ("4.57.6", "5.0.0", "5.5.4", "5.10.4", "5.23.0")
PEFT = ("0.17.1", "0.18.1", "0.19.1", "0.20.0", "0.21.2")


class Pair(NamedTuple):
    transformers: str
    peft: str


ALL = tuple(Pair(one, other) for one in TRANSFORMERS for other in PEFT)
#: A pair that loads it rightly, beside this environment's own, and one that loads it wrongly without a warning.
IN_CI = {Pair("5.23.0", "0.18.1"): "wrong"}
#: Exit statuses of verify.py.
OUTCOMES = {0: "right", 1: "wrong", 2: "refused"}


def build(pair: Pair) -> Path:
    """The Python of an environment with these two versions."""
    name = f"transformers-{pair.transformers}-peft-{pair.peft}"
    return environment(name, (f"transformers=={pair.transformers}",), ("--no-deps", f"peft=={pair.peft}"))


def loads(python: Path, adapter: Path) -> tuple[str, str]:
    """How the adapter loads there, `right`, `wrong` or `refused`; and what verify.py printed."""
    command = [str(python), "-I", str(adapter / "verify.py"), "--base", str(TINY_PATH)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    return OUTCOMES[done.returncode], (done.stdout + done.stderr).strip()


def make_adapter(server: Weftd, folder: Path) -> Path:
    """A briefly trained adapter of all modules, as `weft download` writes it."""
    import weft

    tokens = [(7 * i) % 300 + 30 for i in range(24)]
    inputs = {"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)}
    datum = weft.types.Datum(weft.types.ModelInput.from_ints(tokens[:-1]), inputs)
    with weft.ServiceClient(base_url=server.url, api_key=server.key()) as service:
        run = service.create_lora_training_client(BASE_MODEL, rank=4, seed=1)
        for _ in range(6):
            run.forward_backward([datum], "cross_entropy")
            run.optim_step(weft.types.AdamParams(learning_rate=4e-3))
        path = run.save_weights_for_sampler("w").result(60).path
    asking = {**os.environ, "WEFT_BASE_URL": server.url, "WEFT_API_KEY": server.key()}
    subprocess.run([str(BIN / "weft"), "download", path, "--to", str(folder)], env=asking, check=True, timeout=120)
    return folder


def main() -> int:
    """Load with all pairs of versions and write down the outcomes."""
    found: dict[str, dict[str, str]] = {}
    with tempfile.TemporaryDirectory() as name:
        server = Weftd(Path(name) / "data").start()
        try:
            adapter = make_adapter(server, Path(name) / "adapter")
        finally:
            server.stop()
        for pair in ALL:
            outcome, said = loads(build(pair), adapter)
            found.setdefault(pair.transformers, {})[pair.peft] = outcome
            print(f"transformers {pair.transformers}, peft {pair.peft}: {outcome}: {said.splitlines()[-1]}", flush=True)
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
