"""Base models' tokenizers, asked for as of the Hugging Face hub. With its client: tests/e2e/test_official_sdk.py."""

from __future__ import annotations

import hashlib
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.api.conftest import MODEL, World
from workers.model.tiny import TINY_PATH

TOKENIZER = (TINY_PATH / "tokenizer.json").read_bytes()


def ask(world: World, path: str, method: str = "GET") -> Any:
    return world.http.request(method, f"/hub/{path}", headers={"authorization": f"Bearer {world.key}"})


def test_a_file_and_its_head(world: World) -> None:
    sha = ask(world, f"api/models/{MODEL}").json()["sha"]
    for revision in ("main", sha):
        head, whole = (ask(world, f"{MODEL}/resolve/{revision}/tokenizer.json", method) for method in ("HEAD", "GET"))
        assert (head.content, whole.content) == (b"", TOKENIZER)
        for reply in (head, whole):
            assert reply.headers["content-length"] == str(len(TOKENIZER))
            assert reply.headers["etag"] == f'"{hashlib.sha256(TOKENIZER).hexdigest()}"'
            assert reply.headers["x-repo-commit"] == sha


def test_lists(world: World, tmp_path: Path) -> None:
    card = world.service.cards[MODEL]
    folder = shutil.copytree(card.path, tmp_path / "model") / "additional_chat_templates"
    folder.mkdir()
    (folder / "tool_use.jinja").write_text("{{ tools }}")
    object.__setattr__(world.service, "cards", {MODEL: replace(card, path=folder.parent)})
    (template,) = ask(world, f"api/models/{MODEL}/tree/main/additional_chat_templates").json()
    assert (template["path"], template["size"]) == ("additional_chat_templates/tool_use.jinja", 11)
    assert ask(world, f"{MODEL}/resolve/main/{template['path']}").content == b"{{ tools }}"
    top = ask(world, f"api/models/{MODEL}/tree/main").json()
    assert "tokenizer.json" in [file["path"] for file in top]
    assert template not in top
    assert ask(world, f"api/models/{MODEL}/tree/main?recursive=true").json() == [*top, template]
    described = ask(world, f"api/models/{MODEL}/revision/main").json()
    assert [file["rfilename"] for file in described["siblings"]] == [file["path"] for file in [*top, template]]


@pytest.mark.parametrize(
    ("served", "asked"),
    [
        ("org/model:peft:262144", "org/model"),
        ("org/model/variant:peft:64", "org/model/variant"),
        ("org/model/variant", "org/model"),
        ("meta-llama/Llama-3.2-1B", "thinkingmachineslabinc/meta-llama-3-instruct-tokenizer"),
    ],
)
def test_a_model_is_found_by_the_name_that_tinkers_sdk_makes_of_its_own(world: World, served: str, asked: str) -> None:
    object.__setattr__(world.service, "cards", {"org/other": None, served: world.service.cards[MODEL]})
    assert ask(world, f"api/models/{asked}").json()["id"] == asked
    assert ask(world, f"{asked}/resolve/main/tokenizer.json").content == TOKENIZER


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("api/models/other/model", "RepoNotFound"),
        ("other/model/resolve/main/tokenizer.json", "RepoNotFound"),
        (f"{MODEL}/resolve/main/model.safetensors", "EntryNotFound"),
        (f"{MODEL}/resolve/main/..%2f..%2fconfig.json", "EntryNotFound"),
        (f"{MODEL}/resolve/v2/tokenizer.json", "RevisionNotFound"),
        (f"api/models/{MODEL}/revision/v2", "RevisionNotFound"),
        (f"api/models/{MODEL}/tree/main/additional_chat_templates", "EntryNotFound"),
    ],
)
def test_what_is_not_there_is_said_as_the_hub_says_it(world: World, path: str, code: str) -> None:
    reply = ask(world, path)
    assert (reply.status_code, reply.headers["x-error-code"]) == (404, code), reply.text


def test_nothing_without_a_key(world: World) -> None:
    assert world.http.get(f"/hub/{MODEL}/resolve/main/tokenizer.json").status_code == 401
