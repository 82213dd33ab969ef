"""The code blocks of the documentation pages: which of them run as printed, and why the others do not."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = ["README.md", "CONTRIBUTING.md", "client_sdk/README.md"]
PAGES += sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("docs/**/*.md"))
#: A block between fences, or lines that are indented by four after an empty one.
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$|(?<=\n\n)((?: {4}[^\n]*\n|\n)+?)(?=\n*(?! {4}|\n)|\Z)", re.S | re.M)

#: Blocks between fences of `python` and `sh` that do not run where the others of their page do, by their first line.
ELSEWHERE = {
    "make setup": "a checkout and a terminal of its own: tests/deploy/test_wheels.py",
    ".venv/bin/weftd key create --data-dir ./weft-data --org my-team > my-team.key": "tests/deploy/test_wheels.py",
    "python3 -m venv client": "installs from a package index: tests/deploy/test_wheels.py",
    "import verifiers as vf": "needs packages that tests/rl_packages has in environments of its own",
    "import verifiers.v1 as vf  # 0.4": "needs verifiers 0.4: tests/rl_packages/door_loops.py is this loop",
}


@dataclass(frozen=True)
class Block:
    """A code block. `language` is empty if it is indented: a line or two to look at, or settings."""

    page: str
    language: str
    text: str

    @property
    def first(self) -> str:
        return self.text.split("\n", 1)[0]


def blocks(page: str) -> list[Block]:
    """All blocks of a page, in order; `page` is its path in the checkout."""
    found = _BLOCK.findall((ROOT / page).read_text())
    return [
        Block(page, language, text or "\n".join(line[4:] for line in lines.rstrip("\n").split("\n")) + "\n")
        for language, text, lines in found
    ]


def runnable(page: str, language: str) -> list[str]:
    """The blocks of a page in a language that run where they stand, in order."""
    return [block.text for block in blocks(page) if block.language == language and block.first not in ELSEWHERE]
