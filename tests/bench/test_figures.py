"""Each measured figure in the documents stands in a table that a command in bench/ has made."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bench.figures import TABLES, filled

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"])
MADE = re.compile(r"<!-- figures: [\w-]+ -->.*?<!-- end of figures -->", re.DOTALL)
#: A number with a unit in which results are measured, or a comparison.
FIGURE = re.compile(
    r"\d[\d.,]* ?(?:µs|ms|tokens/s|GFLOPS|GB/s|MB/s)\b"
    r"|\d[\d.,]* times (?!its\b)"
    r"|\d[\d.,]* % (?:faster|slower|more|less)\b"
    r"|\b(?:\w+ times|twice) as (?:fast|slow|much|many|long|large)\b"
    r"|\b\w+ times (?:faster|slower|larger|smaller|cheaper)\b"
)
#: A sentence that says that something was measured: there a number in any unit is a figure.
SAID_TO_BE = re.compile(r"[^.]*\bmeasured\b(?:[^.]|\.(?=\d))*", re.IGNORECASE)
NUMBER = re.compile(r"\d[\d.,]* ?(?:s|seconds|minutes|%|KB|MB|GB|KiB|MiB|GiB|sockets|tokens|samples)(?![\w/])")
#: Figures that are no measurements of ours: settings, bounds that the code keeps, arithmetic, and those of others.
GIVEN = {
    "50 ms": "how long a sample is left to one generator (LEFT_S)",
    "20 times ": "what `make soak TIMES=20` means",
    "16 times ": "the weight of interactive work",
    "30 ms": "what a distant object store is assumed to take",
    "350 GB/s": "assumed of NVLink 4, in the arithmetic of sharding",
    "48 tokens/s": "of the published cluster that the simulator plays",
    "816 tokens/s": "of the published cluster that the simulator plays",
    "three times as long": "how much longer a neighbour may wait",
    "10 %": "how far off the simulator may be",
    "3.6 times ": "parameters of an adapter, counted from shapes",
}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.stem)
def test_tables_are_those_made_from_the_results(document: Path) -> None:
    text = document.read_text()
    assert filled(text) == text, f"python bench/figures.py makes {document.name} anew"


def test_every_table_is_shown_somewhere() -> None:
    shown = {name for path in DOCUMENTS for name in re.findall(r"<!-- figures: ([\w-]+) -->", path.read_text())}
    assert shown == set(TABLES)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.stem)
def test_no_figure_stands_outside_of_a_table(document: Path) -> None:
    free = MADE.sub("", document.read_text())
    strangers = [found for found in figures(free) if found not in GIVEN]
    assert not strangers, f"{document.name}: where was this measured? {strangers}"


def figures(text: str) -> list[str]:
    prose = re.sub(r"^(?: {4}.*|\|.*)$", "", text, flags=re.MULTILINE)  # without commands and tables of descriptions
    return FIGURE.findall(text) + [found for said in SAID_TO_BE.findall(prose) for found in NUMBER.findall(said)]


def test_a_figure_put_in_by_hand_is_found() -> None:
    given = {
        "takes 3 ms, 1,200 tokens/s and 2.4 times as long": ["3 ms", "1,200 tokens/s", "2.4 times "],
        "is ten times faster, and takes twice as long": ["ten times faster", "twice as long"],
        "Waits 5 s. Measured on two cores: 3.7 s and 12 sockets.": ["3.7 s", "12 sockets"],
        "Waits 5 s. What it costs was measured.": [],
    }
    for text, found in given.items():
        assert figures(text) == found
    text = (ROOT / "docs" / "performance.md").read_text()
    assert filled(text.replace("| yes |", "| no |", 1)) == text
