"""What may import what: the contracts of pyproject.toml ([tool.importlinter]), and no circles between files."""

from __future__ import annotations

from graphlib import TopologicalSorter

import grimp
from importlinter.cli import lint_imports

ROOMS = ("api", "billing", "migrations", "scheduler", "store", "workers", "weft")


def test_imports_keep_the_contracts() -> None:
    assert lint_imports(config_filename="pyproject.toml", no_cache=True, no_logo=True) == 0


def test_no_file_imports_itself_in_a_circle() -> None:
    graph = grimp.build_graph(*ROOMS, cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    TopologicalSorter(imports).prepare()  # raises CycleError, which names the circle
