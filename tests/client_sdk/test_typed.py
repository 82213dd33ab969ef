"""mypy --strict and pyright find types for the Python of both READMEs, and no client's async twin returns `Any`."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import weft

from tests.pages import ROOT, runnable

PAGES = {"readme": "README.md", "client": "client_sdk/README.md", "concepts": "docs/concepts.md"}
CLIENTS = ("ServiceClient", "TrainingClient", "SamplingClient", "RestClient")
#: Lines that get a class of transformers, whose types the checkout's settings skip.
OF_TRANSFORMERS = {"get_tokenizer_async"}


@pytest.fixture
def programs(tmp_path: Path) -> list[Path]:
    """The pages' Python, and a program that reveals each twin's type."""
    for name, page in PAGES.items():
        code = "\n".join(runnable(page, "python"))
        assert "weft.ServiceClient()" in code
        (tmp_path / f"{name}.py").write_text(code)
    asked = ["import weft"]
    for client in CLIENTS:
        asked.append(f"def of_{client}(it: weft.{client}) -> None:")
        twins = {name for name in dir(getattr(weft, client)) if name.endswith("_async")}
        asked += [f"    reveal_type(it.{name})" for name in sorted(twins - OF_TRANSFORMERS)]
    (tmp_path / "twins.py").write_text("\n".join(asked) + "\n")
    return sorted(tmp_path.glob("*.py"))


def test_by_mypy(programs: list[Path]) -> None:
    """With the checkout's own strict settings, and the cache of `make lint`."""
    command = [sys.executable, "-m", "mypy", *map(str, programs)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout
    revealed = re.findall(r'Revealed type is "(.*)"', done.stdout)
    assert len(revealed) > 60
    for twin in revealed:
        arguments, given = re.fullmatch(r"def (.*) -> typing\.Coroutine\[Any, Any, (.*)\]", twin).groups()  # type: ignore[union-attr]
        assert "*args" not in arguments
        assert given != "Any"


@pytest.mark.long  # it reads all of transformers: 20 s
def test_by_pyright(programs: list[Path]) -> None:
    node, found = shutil.which("node"), find_spec("pyright")
    if node is None or found is None or found.origin is None:
        pytest.skip("pyright needs node")
    folder = programs[0].parent
    settings = {"extraPaths": [str(ROOT / "client_sdk")], "venvPath": str(Path(sys.prefix).parent)}
    settings["venv"] = Path(sys.prefix).name
    (folder / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [node, str(Path(found.origin).parent / "dist" / "index.js"), "-p", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout
    assert "0 errors" in done.stdout
