"""Files written by others are in the tree as they were published, with their licences."""

from __future__ import annotations

import hashlib
import json

import pytest

from api.console.render import STATIC

VENDOR = STATIC / "vendor"
MANIFEST = json.loads((VENDOR / "manifest.json").read_text())["files"]


@pytest.mark.parametrize("entry", MANIFEST, ids=lambda entry: entry["file"])
def test_files_are_what_the_manifest_says(entry: dict[str, str]) -> None:
    content = (VENDOR / entry["file"]).read_bytes()
    assert hashlib.sha256(content).hexdigest() == entry["sha256"]
    if entry["package"] == "uplot" and entry["file"].endswith(".js"):
        assert f"(v{entry['version']})" in content.decode()
    if entry["package"] == "htmx.org":
        assert f'version:"{entry["version"]}"' in content.decode()
    licence = (VENDOR / entry["licence_file"]).read_text()
    assert {"MIT": "The MIT License", "0BSD": "Zero-Clause BSD"}[entry["licence"]] in licence


def test_every_vendored_file_is_in_the_manifest() -> None:
    named = {name for entry in MANIFEST for name in (entry["file"], entry["licence_file"])}
    assert {path.name for path in VENDOR.iterdir()} == named | {"manifest.json"}
