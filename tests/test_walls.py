"""What may import what: the contracts of pyproject.toml ([tool.importlinter]), and no circles between files."""

from __future__ import annotations

import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import grimp

ROOMS = ("api", "billing", "migrations", "scheduler", "store", "workers", "weft", "weft_server")


def test_imports_keep_the_contracts() -> None:
    """In a process of its own: it takes over the loggers of the one that it runs in."""
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache", "--no-logo"]
    checked = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_no_file_imports_itself_in_a_circle() -> None:
    graph = grimp.build_graph(*ROOMS, cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    TopologicalSorter(imports).prepare()  # raises CycleError, which names the circle
