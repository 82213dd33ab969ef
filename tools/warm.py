"""A process that has imported what tests import, and forks for every run of them: a run begins in milliseconds. For
`tools.mutants`, which runs the same tests hundreds of times with one file changed.

    python -m tools.warm SOCKET MODULE TESTS...

The tests run once, cold. What that has imported is then kept, but for the tests, MODULE (a file of this folder) and
what imports it, by way of others too: those are read anew in every run; MODULE is compiled anew, because it changes
too fast for the times of files. Who connects to SOCKET runs the tests and reads one byte: `0` if they passed; who
leaves before ends the run.
"""

from __future__ import annotations

import ast
import gc
import importlib
import importlib.util
import os
import select
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

import pytest
from hypothesis import Phase, settings

#: Seconds between two looks at a run.
LOOK_S = 0.01

#: A failing search of Hypothesis is enough: its example is not shrunk.
FOUND = settings(deadline=None, derandomize=True, database=None, phases=(Phase.explicit, Phase.generate))


def main(path: str, module: str, tests: Sequence[str]) -> int:
    """Serve until killed; returns 1, and prints the output, if the tests fail without a fault."""
    settings.register_profile("found", FOUND)
    settings.load_profile("found")  # those that tests register inherit it
    names = Path(f"{path}.names")
    if _wait(_fork(lambda: _first(names, module, tests))) != 0:
        return 1
    Path(importlib.util.cache_from_source(module)).unlink(missing_ok=True)
    sys.dont_write_bytecode = True
    for name in names.read_text().split():
        with suppress(Exception):  # what is only there under another name, or not for everybody
            importlib.import_module(name)
    assert _name(module) not in sys.modules, f"{module} is kept: what imports it was not seen"
    gc.freeze()  # what is kept is not looked through again by each run
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(f"{path}.new")
        listening.listen()
        os.rename(f"{path}.new", path)
        while True:
            client, _ = listening.accept()
            with client:
                _serve(client, tests)


def _first(names: Path, module: str, tests: Sequence[str]) -> int:
    """Run the tests; write into `names` the modules that they imported and that may be kept."""
    sys.dont_write_bytecode = False
    code = int(pytest.main(list(tests)))
    found = {name: getattr(imported, "__file__", None) for name, imported in sys.modules.items()}
    files = {name: Path(file) for name, file in found.items() if file}
    anew = dependents(_name(module), files, Path.cwd()) | {"__main__"}
    names.write_text(" ".join(name for name in files if name not in anew and name.partition(".")[0] != "tests"))
    return code


def dependents(module: str, files: Mapping[str, Path], folder: Path) -> set[str]:
    """`module`, and those of these modules in `folder` that import it, directly or through others."""
    imports = {name: imported(file) | _whole(name) for name, file in files.items() if file.is_relative_to(folder)}
    found = {module}
    while more := {name for name, named in imports.items() if named & found} - found:
        found |= more
    return found


@cache
def imported(file: Path) -> frozenset[str]:
    """The names of modules that a file imports, anywhere in it, with their packages; and of names that may be
    modules."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())) if file.suffix == ".py" else ():
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset().union(*map(_whole, found))


def _whole(name: str) -> frozenset[str]:
    """A module's name and those of its packages."""
    parts = name.split(".")
    return frozenset(".".join(parts[:end]) for end in range(1, len(parts) + 1))


def _name(module: str) -> str:
    return module.removeprefix("client_sdk/").removesuffix(".py").replace("/", ".")


def _serve(client: socket.socket, tests: Sequence[str]) -> None:
    child = _fork(lambda: _quietly(tests))
    while (code := _ended(child)) is None:
        if select.select([client], [], [], LOOK_S)[0]:
            with suppress(ProcessLookupError):  # not a group of its own yet
                os.killpg(child, signal.SIGKILL)
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return
    with suppress(BrokenPipeError):  # it has just left
        client.sendall(b"0" if code == 0 else b"1")


def _quietly(tests: Sequence[str]) -> int:
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 1)
        os.dup2(nothing.fileno(), 2)
    return int(pytest.main(list(tests)))


def _fork(run: Callable[[], int]) -> int:
    """Fork a process that runs it, in a group of its own."""
    child = os.fork()
    if child:
        return child
    os.setsid()
    code = 2
    try:
        code = run()
    finally:
        sys.stdout.flush()
        os._exit(code)


def _wait(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _ended(child: int) -> int | None:
    found, status = os.waitpid(child, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if found else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
