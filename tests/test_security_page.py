"""docs/security.md names tests that exist, and what it says of requests to elsewhere."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[1]
PAGE = (CHECKOUT / "docs" / "security.md").read_text()
NAMED = sorted(set(re.findall(r"`(tests/[^`]+)`", PAGE)))
RISKS = re.findall(r"^\| API(\d+) ", PAGE, re.MULTILINE)

#: What may ask others for something in the server's processes: Stripe's own client, those of the object store and of
#: the OpenID provider, and the commands of an operator.
ASKING = {"api/commands", "api/doctor", "api/oidc/provider.py", "billing/payments", "store/blobs/bucket.py"}
CLIENTS = {"aiohttp", "http", "httpx", "obstore", "requests", "urllib", "urllib3"}


def test_every_risk_is_on_the_page_with_tests() -> None:
    assert [int(number) for number in RISKS] == list(range(1, 11))
    assert all("`tests/" in line for line in PAGE.splitlines() if line.startswith("| API"))


@pytest.mark.parametrize("named", NAMED)
def test_every_test_that_the_page_names_exists(named: str) -> None:
    file, _, name = named.partition("::")
    tree = ast.parse((CHECKOUT / file).read_text())
    functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    assert any(found.startswith("test_") for found in functions)
    assert not name or name in functions


def test_what_is_served_fetches_no_address() -> None:
    """Nothing in the server's rooms imports a client of HTTP, so no request makes it ask somebody for something."""
    found = []
    for room in ("api", "billing", "scheduler", "store"):
        for file in (CHECKOUT / room).rglob("*.py"):
            name = file.relative_to(CHECKOUT).as_posix()
            if not any(name.startswith(allowed) for allowed in ASKING):
                found += [f"{name}: {module}" for module in imported(file) if is_client(module)]
    assert found == []


def is_client(module: str) -> bool:
    return module.partition(".")[0] in CLIENTS and module not in ("http", "urllib.parse")


def imported(file: Path) -> list[str]:
    names: list[str] = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None and not node.level:
            names.append(node.module)
    return names
