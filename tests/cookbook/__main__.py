"""`make cookbook`: run every recipe, and print a line for each. Arguments are the names of recipes to run alone."""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from tests.cookbook.environment import build, serve, shadow
from tests.cookbook.recipes import RECIPES, run


def main(chosen: list[str]) -> int:
    """Run the recipes; the number of those that failed."""
    python, failed = build(), 0
    with tempfile.TemporaryDirectory() as name:
        folder = shadow(Path(name) / "work")
        recipes = [r for r in RECIPES if not chosen or r.name in chosen]
        server = serve(Path(name) / "data", dict.fromkeys(recipe.model for recipe in recipes))
        try:
            for recipe in recipes:
                start = time.monotonic()
                try:
                    run(recipe, python, server, folder)
                    said = "ok"
                except Exception as error:
                    failed += 1
                    said = f"FAILED: {error}"
                print(f"{recipe.name:<55} {time.monotonic() - start:5.0f} s  {said}", flush=True)
        finally:
            server.stop()
    return failed


if __name__ == "__main__":
    sys.exit(1 if main(sys.argv[1:]) else 0)
