"""Settings: file, then command line; anything unknown or impossible is one clear line."""

from __future__ import annotations

import re
import tomllib
from itertools import dropwhile, takewhile
from pathlib import Path
from typing import Any

import pytest

from store.environment import from_environment
from store.load_settings import MAX_CHARACTERS, load_settings
from store.settings import Settings, SettingsError

#: Suffixes of the files that may name variables.
TEXT = {".py", ".md", ".yaml", ".toml", ".sh", ".tpl", ".service"}


def write(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "weft.toml"
    file.write_text(text)
    return file


def test_defaults(tmp_path: Path) -> None:
    settings = load_settings(None, data_dir=tmp_path / "data", port=None)
    assert settings.port == 8000
    assert settings.trainer.pass_tokens == 4096
    assert settings.trainer.slice_tokens == 1024
    assert settings.generator.slots == 0  # as many as memory allows
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


@pytest.mark.parametrize("option", [{"trainers": 2}, {"trainer_ranks": 2}, {"engine": ("vllm",)}])
def test_a_section_that_is_none_is_one_line_beside_the_options_that_go_into_it(
    tmp_path: Path, option: dict[str, Any]
) -> None:
    with pytest.raises(SettingsError, match=r"(trainer|generator): Input should be"):
        load_settings(write(tmp_path, "data_dir = 'x'\ntrainer = 3\ngenerator = 3"), **option)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("data_dri = 'x'", r"data_dri: there is no such setting; did you mean data_dir\?"),
        ("data_dir = 'x'\n[limits]\nmax_bodies = 3", r"limits\.max_bodies: .*; did you mean max_body_bytes\?"),
        ("data_dir = 'x'\nqqq = 3", r"qqq: .*; docs/operating.md lists all"),
        ("data_dir = 'x'\n[generator]\nslot = 3", r"generator\.slot: .*; did you mean slots\?"),
        ("data_dir = 'x'\n[generator.vllm]\nadress = 3", r"generator\.vllm\.adress: there is no such setting"),
        ("data_dir = 'x'\nport = 70000", "port"),
        ("data_dir = 'x'\n[trainer]\npass_tokens = 0", r"trainer\.pass_tokens"),
        ("data_dir = 'x'\nmodels = 3", "models"),
        ("data_dir = 'x'\n[trainer]\nranks = 2\ndevice = 'cuda:1'", r"trainer: .*each of 2 ranks has a GPU of its own"),
        ("data_dir = 'x'\n[trainer]\nnodes = 2", r"trainer: .*2 nodes need a rendezvous"),
        ("data_dir = 'x'\nredis_url = 'localhost:6379'", r"redis_url: .*a Redis is redis://HOST:PORT/NUMBER"),
        ("data_dir = 'x'\nredis_url = 'redis://:secret@host:port'", "redis_url: .*Port could not be cast"),
        (
            "data_dir = 'x'\ndatabase_url = 'postgres://me:secret@host/weft'",
            r"database_url: [^,]*is postgresql\+psycopg://USER",
        ),
        ("data_dir = 'x'\nblob_url = 's3://Bucket'", "blob_url: .*an object store is s3://BUCKET/PREFIX"),
        ("data_dir = 'x'\n[generator]\nslots = 9223372036854775808", r"generator\.slots: .*less than or equal"),
        ("data_dir = 'x'\ndrain_s = inf", "drain_s: .*a number of at most"),
        ("data_dir = 'x'\nsession_idle_s = 1e300", "session_idle_s: .*a number of at most"),
        ("data_dir = 'x'\n[ownership]\nserver_usd = nan", r"ownership\.server_usd"),
        ('data_dir = "x"\nbase_dir = "a\\u0000b"', "base_dir: .*NUL"),
        ('data_dir = "x\\u0000"', "data_dir: .*NUL"),
        ('data_dir = "x"\nmodels = {m = "a\\u0000b"}', "models: .*NUL"),
        ("port = 1", "data_dir: is missing: .*--data-dir"),
        ("port =", "not TOML"),
        ("#" * (MAX_CHARACTERS + 1), f"more than {MAX_CHARACTERS} characters: name a file of settings"),
        ("data_dir = 'x'\nport = " + "9" * 5000, "not TOML: Exceeds the limit"),
        ("data_dir = 'x'\nport = " + "[" * 5000, "not TOML"),
        ("data_dir = 'x'\nport = 0x" + "f" * 5000, "port: "),
        ("data_dir = 'x'\nport = 70000", "port: .*65535, got 70000"),
        ("data_dir = 'x'\n[trainer]\nshard = 'al'", "trainer.shard: .*, got 'al'"),
        ("data_dir = 'x'\nserver_secret = 'short'", "server_secret: [^,]*, not 5$"),
        ("data_dir = 'x'\n[jobs]\nredis_url = 'localhost'", "jobs.redis_url: .*a Redis is redis://"),
    ],
)
def test_mistakes_are_one_line_that_names_the_key(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message) as caught:
        load_settings(write(tmp_path, text))
    assert "\n" not in str(caught.value)
    assert "secret@" not in str(caught.value)


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
    with pytest.raises(SettingsError, match="WEFT_TRAINER__THREDS"):
        load_settings(file)


@pytest.mark.parametrize(
    ("variable", "message"),
    [
        ("WEFT_TRAINER__THREADS", r"^WEFT_TRAINER__THREADS: Input should be"),
        ("WEFT_GENERATOR__VLLM__MAX_RANK", r"^WEFT_GENERATOR__VLLM__MAX_RANK: Input should be"),
        ("WEFT_SERVER_SECRET", r"^WEFT_SERVER_SECRET: .*at least 32"),
        ("WEFT_TRAINER__THREDS", r"^WEFT_TRAINER__THREDS: there is no such setting; did you mean threads\?"),
    ],
)
def test_a_mistake_in_a_variable_is_told_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, message: str
) -> None:
    monkeypatch.setenv(variable, "none")
    file = write(tmp_path, "data_dir = 'd'\n[trainer]\nthreads = 'x'")
    if variable == "WEFT_TRAINER__THREADS":  # the file has a value too, and wins
        with pytest.raises(SettingsError, match=r"weft\.toml: trainer\.threads"):
            load_settings(file)
    with pytest.raises(SettingsError, match=message):
        load_settings(write(tmp_path, "data_dir = 'd'"))


@pytest.mark.parametrize("text", ["9" * 5000, "[" * 5000], ids=["digits", "nested"])
def test_a_variable_that_is_no_toml_is_a_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("WEFT_TRAINER__THREADS", text)
    with pytest.raises(SettingsError, match=r"^WEFT_TRAINER__THREADS: .{0,160}$"):
        load_settings(None, data_dir=tmp_path)


@pytest.mark.parametrize(
    ("variable", "message"),
    [
        ("WEFT_DATABSE_URL", r"^WEFT_DATABSE_URL: there is no such variable; is WEFT_DATABASE_URL meant\?"),
        ("WEFT_STRIPE_KEY", "is WEFT_STRIPE_SECRET_KEY meant"),
        ("WEFT_PORTT", r"^WEFT_PORTT: there is no such variable \(docs"),
        ("WEFT_ZZZ", r"^WEFT_ZZZ: there is no such variable \(docs"),
        ("WEFT_LONG_POLL_S", "long_poll_s cannot be set by the environment"),
        ("WEFT_PORT", "port cannot be set by the environment"),
    ],
)
def test_variables_that_nobody_reads_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, message: str
) -> None:
    monkeypatch.setenv(variable, "1")
    with pytest.raises(SettingsError, match=message):
        load_settings(write(tmp_path, 'data_dir = "d"\n'))


def test_variables_of_other_programs_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client's variables, secrets read elsewhere, and those that Kubernetes sets for services named weft."""
    for name, value in {
        **{
            "BASE_URL": "http://h",
            "API_KEY": "tml-x",
            "TAGS": "a",
            "STRIPE_SECRET_KEY_FILE": "/f",
            "NEVER_HEARD_OF": "",
        },
        **{"PORT": "tcp://10.43.0.7:8000", "SERVICE_HOST": "10.43.0.7", "SERVICE_PORT": "8000"},
        **{"SERVICE_PORT_HTTP": "8000", "PORT_8000_TCP": "tcp://10.43.0.7:8000", "PORT_8000_TCP_ADDR": "10.43.0.7"},
        **{"API_SERVICE_HOST": "10.43.0.8", "API_PORT": "tcp://10.43.0.8:8000"},
    }.items():
        monkeypatch.setenv(f"WEFT_{name}", value)
    assert load_settings(write(tmp_path, 'data_dir = "d"\n')).port == 8000


def test_every_variable_that_is_read_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each WEFT_ name in the files that an operator runs and reads; _WEFT_ names are of the shell's completion."""
    root = Path(__file__).parents[2]
    rooms = ["api", "store", "billing", "scheduler", "workers", "weft_server", "client_sdk", "deploy", "docs"]
    texts = [path for room in rooms for path in (root / room).rglob("*") if path.suffix in TEXT]
    found = {name for path in texts for name in re.findall(r"(?<![A-Z_])WEFT_[A-Z_]*[A-Z]\b", path.read_text())}
    for name in found:
        if "__" not in name:
            monkeypatch.setenv(name, "x")
    from_environment(Settings.model_fields)
    assert len(found) > 12


def test_devices_and_dtypes(tmp_path: Path) -> None:
    file = write(tmp_path, 'data_dir = "d"\n[trainer]\ndevice = "cuda:1"\ndtype = "float32"\n')
    settings = load_settings(file)
    assert (settings.trainer.device, settings.trainer.dtype) == ("cuda:1", "float32")
    assert (settings.generator.device, settings.generator.dtype) == ("auto", "auto")
    with pytest.raises(SettingsError, match=r"generator\.device"):
        load_settings(write(tmp_path, 'data_dir = "d"\n[generator]\ndevice = "gpu"\n'))


def test_the_page_for_operators_shows_every_setting_with_its_default() -> None:
    """`[models]`, `prices` and secrets have no default; that of threads and the data folder depends on the machine."""
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
