"""The documentation builds as a site: every page is there, no link is dead, and nothing comes from another site."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tools.timelines import PICTURE, drawn

ROOT = Path(__file__).parents[2]


def build(checkout: Path, site: Path) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--config-file",
        str(checkout / "mkdocs.yml"),
        "--site-dir",
        site,
    ]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(
        command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=200, check=False
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = build(ROOT, folder)
    assert done.returncode == 0, done.stderr
    return folder


class Fetched(HTMLParser):
    """The addresses that a browser fetches for a page without a click."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag == "link" and values.get("rel") not in ("next", "prev", "canonical"):
            self.found.append(values["href"] or "")
        if tag != "a" and values.get("src"):
            self.found.append(values["src"] or "")


def test_every_page_is_there_and_nothing_comes_from_elsewhere(site: Path) -> None:
    sources = [path.relative_to(ROOT / "docs").with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")]
    assert all((site / path).is_file() for path in sources)
    for page in site.rglob("*.html"):
        fetched = Fetched(page).found
        assert fetched
        for address in fetched:
            assert not re.match(r"(https?:)?//", address), f"{page.name}: {address}"
            if page.name != "404.html":
                assert (page.parent / address.split("?")[0].split("#")[0]).is_file(), f"{page.name}: {address}"
    assert "fonts.g" not in "".join(sheet.read_text() for sheet in site.rglob("*.css"))


def test_the_reference_is_made_of_docstrings(site: Path) -> None:
    clients, rl = (site / "reference" / "clients.html").read_text(), (site / "reference" / "rl.html").read_text()
    for name in (
        "ServiceClient.create_lora_training_client",
        "TrainingClient.forward_backward",
        "RestClient.copy_weights",
    ):
        assert re.search(rf'id="weft\.[a-z_]+\.{name}"', clients), name
    assert "Losses are sums, never means: gradients add up over calls until" in clients
    for name in ("loops.train.train", "supervised.dpo.dpo", "losses.icepop", "schedule.schedules.Async"):
        assert f'id="weft.rl.{name}"' in rl, name
    assert "_async" not in re.findall(r'id="weft\.rest_client[^"]*"', clients)[-1]


def test_pages_that_name_each_other_are_linked(site: Path) -> None:
    assert '<a href="billing.html">billing.md</a> is the whole policy' in (site / "design.html").read_text()
    assert "docs/production.md" in (site / "operating.html").read_text()  # in a block of code a name is no link


def test_a_link_that_leads_nowhere_fails(tmp_path: Path) -> None:
    """A missing page or a missing heading is a warning, and any warning fails the build."""
    wrong = "[x](no-such-page.md) [x](concepts.md#no-such-heading)"
    for name in ("docs", "tools"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("*.png", "tiny_model"))
    whole = (ROOT / "mkdocs.yml").read_text()
    settings, plugins = whole.split("plugins:")[0], whole.split("markdown_extensions:")[1]
    (tmp_path / "mkdocs.yml").write_text(f"{settings}\nmarkdown_extensions:{plugins}".replace("hooks: [tools", "#"))
    (tmp_path / "docs" / "index.md").write_text(f"# Weft\n\n{wrong}\n")
    done = build(tmp_path, tmp_path / "site")
    warnings = [line for line in done.stderr.splitlines() if line.startswith("WARNING")]
    for said in ("no-such-page.md", "no-such-heading"):
        assert any(said in line for line in warnings), done.stderr
    assert done.returncode != 0


def test_the_timelines_are_those_of_the_scheduler() -> None:
    assert PICTURE.read_text() == drawn()
