"""Settings: file, then command line; anything unknown or impossible is one clear line."""

from __future__ import annotations

import tomllib
from itertools import dropwhile, takewhile
from pathlib import Path
from typing import Any

import pytest

from store.settings import SettingsError, load_settings


def write(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "weft.toml"
    file.write_text(text)
    return file


def test_defaults(tmp_path: Path) -> None:
    settings = load_settings(None, data_dir=tmp_path / "data", port=None)
    assert settings.port == 8000
    assert settings.trainer.pass_tokens == 4096
    assert settings.trainer.slice_tokens == 1024
    assert settings.generator.slots == 0  # as memory allows
    assert settings.limits.max_rank == 128
    assert settings.effective_database_url == f"sqlite:///{tmp_path}/data/weft.db"


def test_the_command_line_wins_and_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    file = write(tmp_path, 'data_dir = "d"\nport = 1\nhost = "h"\n[models]\n"Qwen/Q" = "m/q"\n[trainer]\nthreads = 3\n')
    settings = load_settings(file, port=2)
    assert (settings.port, settings.host, settings.trainer.threads) == (2, "h", 3)
    trainer = load_settings(file, trainer_ranks=4).trainer
    assert (trainer.ranks, trainer.threads) == (4, 3)
    assert settings.data_dir == tmp_path / "d"
    assert settings.models == {"Qwen/Q": tmp_path / "m/q"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("data_dri = 'x'", "data_dri"),
        ("data_dir = 'x'\n[limits]\nmax_bodies = 3", r"limits\.max_bodies"),
        ("data_dir = 'x'\nport = 70000", "port"),
        ("data_dir = 'x'\n[trainer]\npass_tokens = 0", r"trainer\.pass_tokens"),
        ("data_dir = 'x'\nmodels = 3", "models"),
        ("data_dir = 'x'\n[trainer]\nranks = 2\ndevice = 'cuda:1'", r"trainer: .*each of 2 ranks has a GPU of its own"),
        ("data_dir = 'x'\n[trainer]\nnodes = 2", r"trainer: .*2 nodes need a rendezvous"),
        ("port = 1", "data_dir"),
        ("port =", "not TOML"),
    ],
)
def test_mistakes_are_one_line_that_names_the_key(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message) as caught:
        load_settings(write(tmp_path, text))
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"no\.toml"):
        load_settings(tmp_path / "no.toml")


def test_the_environment_sets_what_the_file_leaves_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "TRAINER__THREADS": "5",
        "TRAINER__DEVICE": "cuda:1",
        "TRAINER__MICROBATCH_TOKENS": "64",
        "GENERATOR__REPLICAS": '["torch", "vllm"]',
        "GENERATOR__VLLM__MAX_RANK": "32",
        "LIMITS__MAX_RANK": "",
    }.items():
        monkeypatch.setenv(f"WEFT_{name}", value)
    file = write(tmp_path, 'data_dir = "d"\n[trainer]\nthreads = 3\n[generator.vllm]\nmax_adapters = 2\n')
    settings = load_settings(file)
    trainer, generator = settings.trainer, settings.generator
    assert (trainer.threads, trainer.device, trainer.microbatch_tokens) == (3, "cuda:1", 64)
    assert (generator.kinds, generator.vllm.max_rank, generator.vllm.max_adapters) == (["torch", "vllm"], 32, 2)
    assert settings.limits.max_rank == 128
    monkeypatch.setenv("WEFT_TRAINER__THREDS", "5")
    with pytest.raises(SettingsError, match=r"trainer\.threds"):
        load_settings(file)


def test_devices_and_dtypes(tmp_path: Path) -> None:
    file = write(tmp_path, 'data_dir = "d"\n[trainer]\ndevice = "cuda:1"\ndtype = "float32"\n')
    settings = load_settings(file)
    assert (settings.trainer.device, settings.trainer.dtype) == ("cuda:1", "float32")
    assert (settings.generator.device, settings.generator.dtype) == ("auto", "auto")
    with pytest.raises(SettingsError, match=r"generator\.device"):
        load_settings(write(tmp_path, 'data_dir = "d"\n[generator]\ndevice = "gpu"\n'))


def test_the_page_for_operators_shows_every_setting_with_its_default() -> None:
    """`[models]`, `prices` and secrets have none; threads and the data folder depend on the machine."""
    page = (Path(__file__).parents[2] / "docs" / "operating.md").read_text().partition("## Settings")[2]
    lines = takewhile(
        lambda line: not line or line.startswith("    "), dropwhile(lambda x: x[:4] != "    ", page.splitlines())
    )
    shown = flat(tomllib.loads("\n".join(line.removeprefix("    ") for line in lines)))
    known = flat(load_settings(None, data_dir=Path("data")).model_dump(mode="json"))
    known |= {"generator.vllm.program": "", "trainer.threads": 1, "generator.threads": 1, "data_dir": "data"}
    for name in ("prices", "payments.secret_key", "oidc.client_secret", "server_secret"):
        del known[name]
    del shown["models.Qwen/Qwen3-0.6B"]
    assert shown == known


def flat(values: dict[str, Any], at: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= flat(value, f"{at}{name}.") if isinstance(value, dict) else {at + name: value}
    return found
