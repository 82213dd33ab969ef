"""What no test runs of the pages is right all the same: commands that exist, settings that are taken. No block is there
of which nothing is known."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import click
import pytest
from weft.cli import main as weft

from api.cli import weftd
from api.http.client_wheel import WHEEL_NAME
from billing.prices import load_prices
from store.settings import Settings
from tests.pages import ELSEWHERE, PAGES, ROOT, blocks

PROGRAMS = {"weftd": weftd, "weft": weft}
#: Paragraphs of indented blocks that are neither commands of ours nor settings, by how they begin.
NEITHER = {
    "location /": "tests/deploy/test_proxy.py",
    "table inet": "nft, as root",
    "kubectl create": "needs a cluster: tests/deploy/test_chart.py renders and checks the chart",
    "CREATE ROLE": "SQL, as tests/tenancy/test_row_security.py does it",
    "python3 -m venv": "installs from a package index: tests/deploy/test_wheels.py",
    "pip install": "installs from a package index: tests/deploy/test_wheels.py",
    "export ": "the reader's own server",
    "eval ": "needs zsh and fish; bash completes in tests/e2e/test_guides.py",
    "STRIPE_TEST_KEY": "needs an account of Stripe's",
    "LOCALSTRIPE": "needs that program",
    "python bench/gpu.py": "needs a GPU",
    "amount_nusd =": "a formula",
    "identifier =": "a formula",
    "L = ": "a formula",
    "M <- ": "a formula",
    "|W_i": "a formula",
    "@router": "a line of the code",
    "model = PeftModel": "needs the base model's files: tests/e2e/test_exports.py",
}


def paragraphs(page: str) -> list[str]:
    """Of the page's indented blocks."""
    return [part for block in blocks(page) if not block.language for part in block.text.split("\n\n")]


def test_every_paragraph_is_known() -> None:
    known = ("weft", ".venv/bin/weftd", "make ", ".venv/bin/", "python ", "bash ", "GET ", "sha256sum", *NEITHER)
    everywhere = [part for page in PAGES for part in paragraphs(page)]
    unknown = [part for part in everywhere if not (part.startswith(known) or is_settings(part))]
    assert unknown == []
    for beginning in NEITHER:
        assert any(part.startswith(beginning) for part in everywhere), beginning


def is_settings(part: str) -> bool:
    return re.match(r"\[+[a-z.]+|\w+ = [\[\"\d]", part) is not None


def test_settings_are_taken() -> None:
    """Those of operating.md are held to the defaults by tests/store/test_settings.py."""
    tried = 0
    for page in PAGES:
        indented = [] if page == "docs/operating.md" else [block for block in blocks(page) if not block.language]
        shown = [block.text for block in blocks(page) if block.language == "toml"]
        shown += ["\n".join(filter(is_settings, block.text.split("\n\n"))) for block in indented]
        for text in filter(None, shown):
            given = tomllib.loads(text.replace(", ...]", "]"))
            load_prices(given.pop("prices", None))
            Settings.model_validate({"data_dir": "data", **given})
            tried += 1
    assert tried >= 7


def commands() -> Iterator[str]:
    """What pages say to run of `weft` and `weftd`: each line of a block, and what stands between backticks."""
    for page in PAGES:
        text = (ROOT / page).read_text()
        lines = [line for block in blocks(page) if block.language in ("", "sh") for line in block.text.split("\n")]
        for said in [*lines, *re.findall(r"`(weftd? [^`\n]+)`", text)]:
            for part in re.split(r"\s{3,}|, (?=weft)| / (?=weft)|  #", said.removeprefix(".venv/bin/")):
                if part.startswith(("weft ", "weftd ")):
                    yield part


def wrong(command: str) -> str:
    """What of it there is not: the first command or option of that name."""
    program, *words = command.split()
    here: click.Command = PROGRAMS[program]
    options = {name for parameter in here.params for name in parameter.opts} | {"--help"}
    for word in words:
        names = word.strip("()[],;").split("|")
        if isinstance(here, click.Group) and word[0].isalpha() and word.islower():
            there = [here.get_command(click.Context(here), name) for name in names]
            if None in there:
                return names[there.index(None)]
            here = there[0] or here
            options |= {name for parameter in here.params for name in (*parameter.opts, *parameter.secondary_opts)}
    said = re.findall(r"--[a-z][a-z-]+", command)
    return next((option for option in said if option not in options), "")


def test_commands_are_there() -> None:
    found = set(commands())
    assert len(found) > 100
    assert {command: wrong(command) for command in found if wrong(command)} == {}


def test_the_clients_page_names_each_of_its_commands() -> None:
    page = (ROOT / "docs/sdk.md").read_text()
    assert [name for name in weft.list_commands(click.Context(weft)) if f"weft {name}" not in page] == []


@cache
def messages() -> tuple[str, ...]:
    """What the programs may say: every text in their code that is no docstring."""
    said = []
    for room in ("api", "billing", "client_sdk/weft", "migrations", "scheduler", "store", "workers"):
        for path in (ROOT / room).rglob("*.py"):
            tree = ast.parse(path.read_text())
            bare = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
            for node in ast.walk(tree):
                if isinstance(node, ast.JoinedStr):
                    parts = [part.value if isinstance(part, ast.Constant) else "X" for part in node.values]
                    said.append("".join(map(str, parts)))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in bare:
                    said.append(node.value)
    return tuple(said)


def test_what_messages_name_is_there() -> None:
    """Pages, and commands: between backticks, or from the name of a command on."""
    said = messages()
    pages = {page for text in said for page in re.findall(r"docs/[\w/-]+\.md", text)}
    assert len(pages) >= 10
    assert [page for page in pages if not (ROOT / page).exists()] == []
    named = {found for text in said for found in re.findall(r"\bweftd (?:(?:--)?[a-z][a-z-]*\b ?)+", text)}
    known = weftd.list_commands(click.Context(weftd))
    ours = {found for found in named if found.split()[1] in known}
    assert len(ours) > 20
    assert {command: wrong(command.strip()) for command in ours if wrong(command.strip())} == {}


def test_targets_and_programs_are_there() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    for page in PAGES:
        text = (ROOT / page).read_text()
        assert set(re.findall(r"(?:`|^    )make ([a-z-]+)", text, re.M)) <= targets, page
        for program in re.findall(r"`?(?:\.venv/bin/)?python ((?:bench|examples|tools|deploy)/[\w/]+\.py)", text):
            assert (ROOT / program).exists(), (page, program)


def headings(page: Path) -> set[str]:
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.S | re.M)
    return {heading.replace("`", "").lower() for heading in re.findall(r"^#+ (.*)$", text, re.M)}


def test_links_lead_somewhere() -> None:
    """README's too, which are no part of the site, and headings that a page or a message names in quotes."""
    wrong = []
    for page in PAGES:
        path, text = ROOT / page, (ROOT / page).read_text()
        for target in re.findall(r"\]\(([^)\s:]+)\)", re.sub(r"^```.*?^```$", "", text, flags=re.S | re.M)):
            name, _, anchor = target.partition("#")
            there = (path.parent / name).resolve() if name else path
            anchors = (
                {re.sub(r"[^\w -]", "", heading).replace(" ", "-") for heading in headings(there)} if anchor else {""}
            )
            wrong += [(page, target)] if not there.exists() or anchor not in anchors else []
    for said in [*((ROOT / page).read_text() for page in PAGES), *messages()]:
        for name, heading in re.findall(r"(docs/[\w/-]+\.md)`?,\s+\"([^\"]+)\"", said):
            wrong += [(name, heading)] if heading.lower() not in headings(ROOT / name) else []
    assert wrong == []


def test_the_wheel_is_of_this_version() -> None:
    named = {name for page in PAGES for name in re.findall(r"weft_tuning-[\w.-]+\.whl", (ROOT / page).read_text())}
    assert named - {"weft_tuning-VERSION-py3-none-any.whl"} == {WHEEL_NAME}


@pytest.mark.parametrize("first", ELSEWHERE)
def test_what_runs_elsewhere_stands_on_one_page(first: str) -> None:
    assert sum(block.first == first for page in PAGES for block in blocks(page)) == 1


def test_every_row_stands_in_a_table_and_has_its_columns() -> None:
    """What an empty line cuts off its table is shown as a line of bars."""
    for page in PAGES:
        plain = re.sub(r"^```.*?^```$", "", (ROOT / page).read_text(), flags=re.S | re.M)
        for table in re.findall(r"(?:^\|.*\n)+", plain, re.M):
            head, *rest = [len(re.findall(r"(?<!\\)\|", row)) for row in table.splitlines()]
            assert re.fullmatch(r"\|[ :|-]+\|", table.splitlines()[1:][0] if rest else ""), (page, table)
            assert set(rest) == {head}, (page, table)
