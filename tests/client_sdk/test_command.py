"""The `weft` command as scripts use it: names for runs, exit codes by kind, its version."""

from __future__ import annotations

import asyncio
import errno
import os
import stat
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from starlette.responses import JSONResponse
from weft.cli import look, main
from weft.exports import verify
from weft.future import APIFuture
from weft.rest_client import RestClient
from weft.transport.download import whole
from weft.version import __version__

from tests.client_sdk.stub_server import Stub

RUN = {
    "base_model": "m",
    "model_owner": "acme",
    "is_lora": True,
    "last_request_time": "2026-11-21T08:00:00Z",
}


def weft(stub: Stub, *arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(main, ["--base-url", stub.base_url, "--api-key", "tml-x", *arguments])
    return done.exit_code, done.output


@pytest.fixture
def runs(stub: Stub) -> None:
    metadata = [{"name": "night"}, {"name": "twin"}, {"name": "twin", "continued_from": "tinker://s:train:0/weights/w"}]
    metadata.append({"name": "a\x1b[2Jb\u202ec"})
    found = [{**RUN, "training_run_id": f"s:train:{i}", "user_metadata": given} for i, given in enumerate(metadata)]
    stub.replies["GET /training_runs"] = {
        "training_runs": found,
        "cursor": {"offset": 0, "limit": 1000, "total_count": 4},
    }
    stub.replies["GET /weft/usage"] = {"rows": [], "total_nusd": 0, "total_usd": "0", "price_version": "v1"}


@pytest.mark.usefixtures("runs")
def test_a_run_is_named_by_its_name_or_its_id(stub: Stub) -> None:
    for given in ("night", "s:train:0"):
        assert weft(stub, "cost", given)[0] == 0
        assert stub.asked[-1].query == {"run_id": "s:train:0"}
    code, said = weft(stub, "usage", "--run", "twin")
    assert (code, "s:train:1, s:train:2" in said) == (2, True)
    code, said = weft(stub, "cost", "nobody")
    assert (code, "weft runs" in said) == (4, True)


@pytest.mark.usefixtures("runs")
def test_runs_show_names_and_what_they_go_on_from(stub: Stub) -> None:
    said = weft(stub, "runs")[1]
    assert "night" in said
    assert "a\ufffd[2Jb\ufffdc" in said  # no terminal is told what to do
    assert "tinker://s:train:0/weights/w" in said


@pytest.mark.parametrize(("status", "code"), [(401, 3), (403, 3), (404, 4), (410, 4), (402, 5), (503, 6), (400, 1)])
def test_exit_codes_tell_the_kind_of_failure(stub: Stub, status: int, code: int) -> None:
    stub.replies["GET /weft/balance"] = JSONResponse({"detail": "no"}, status, {"retry-after": "9"})
    assert weft(stub, "balance")[0] == code


@pytest.mark.parametrize("key", ["", "tml-ü"])
def test_no_key_has_the_code_of_a_wrong_one(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    monkeypatch.delenv("TINKER_API_KEY", raising=False)
    monkeypatch.setenv("WEFT_API_KEY", key)
    done = CliRunner().invoke(main, ["--base-url", "http://127.0.0.1:1", "balance"])
    assert (done.exit_code, "WEFT_API_KEY" in done.output) == (3, True)


def test_a_server_that_is_not_there_has_a_code_of_its_own(stub: Stub) -> None:
    stub.base_url = "http://127.0.0.1:1"
    code, said = weft(stub, "balance")
    assert (code, "cannot reach http://127.0.0.1:1" in said) == (6, True)


def test_version(stub: Stub) -> None:
    assert weft(stub, "--version") == (0, f"weft {__version__}\n")


def test_help_and_completion_load_no_client() -> None:
    """Completing a word starts the command anew each time."""
    show = "import sys, weft.cli; print({'numpy', 'pydantic', 'httpx', 'rich', 'asyncio'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", show], text=True) == "set()\n"


def test_the_command_loads_where_click_has_no_generic_types() -> None:
    """The versions before 8.4, which pip keeps for packages that require 8.1.2."""
    older = "import click; click.ParamType = type('ParamType', (click.ParamType,), {'__class_getitem__': None})"
    subprocess.run([sys.executable, "-c", f"{older}; import weft.cli"], check=True)


def test_a_place_that_cannot_be_written_is_named_with_what_to_do(stub: Stub) -> None:
    """Nobody can make a folder in /proc."""
    found = weft(stub, "download", "tinker://s:train:0/weights/w", "--to", "/proc/x")
    assert found == (1, "Error: /proc/x: No such file or directory: name a place that can be read and written\n")


@pytest.mark.parametrize("reference", ["{", '{"base_model": "b", "tokens": [1, 2]}'])
def test_an_adapter_that_cannot_be_tried_is_not_called_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reference: str
) -> None:
    def cut(*_: object) -> list[float]:
        raise RuntimeError("a file is cut")

    monkeypatch.setattr(verify, "loaded_logprobs", cut)
    (tmp_path / "reference.json").write_text(reference)
    done = CliRunner().invoke(main, ["verify", str(tmp_path)])
    assert (done.exit_code, "it could not be tried with these files and versions: " in done.output) == (2, True)


@pytest.mark.parametrize("away", [False, True])
def test_a_hub_that_is_away_is_not_asked(stub: Stub, monkeypatch: pytest.MonkeyPatch, away: bool) -> None:
    """Its client would try again for a minute. The stub knows nothing of models, and answers all the same."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1" if away else stub.base_url)
    verify.ask_the_hub("a/model")
    assert os.environ["HF_HUB_OFFLINE"] == ("1" if away else "")


ENDS_IN_A_DOWNLOAD = """
import sys, tempfile, threading
from pathlib import Path
from weft.exports.folder import made
begun = threading.Event()
def download():
    with made(Path(sys.argv[1])), tempfile.TemporaryDirectory(dir=sys.argv[1]):
        begun.set()
        threading.Event().wait()
threading.Thread(target=download, daemon=True).start()
assert begun.wait(10)
"""


@pytest.mark.parametrize("there_before", [False, True])
def test_a_program_that_ends_in_a_download_leaves_no_empty_folder(tmp_path: Path, there_before: bool) -> None:
    folder = tmp_path / "adapter"
    if there_before:
        folder.mkdir()
    subprocess.run([sys.executable, "-c", ENDS_IN_A_DOWNLOAD, str(folder)], check=True)
    assert list(tmp_path.iterdir()) == [folder] * there_before
    assert not there_before or not list(folder.iterdir())


@pytest.mark.parametrize("through", ["pipe", "link"])
def test_what_is_no_file_is_not_replaced_by_one(tmp_path: Path, through: str) -> None:
    """`weft trace --to /dev/null` replaced the device by a file, for all programs; /dev/stdout is a link."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    with pytest.raises(FileExistsError, match="something else than a file"), whole(tmp_path / through):
        pass
    assert stat.S_ISFIFO((tmp_path / through).stat().st_mode)
    assert (tmp_path / "link").is_symlink()
    assert len(list(tmp_path.iterdir())) == 2


def test_a_trace_is_a_file_and_no_folder(stub: Stub, tmp_path: Path) -> None:
    code, said = weft(stub, "trace", "s", "--to", str(tmp_path))
    assert (code, "is a directory" in said) == (2, True)


@pytest.mark.parametrize(
    "address", ["http://", "http://127.0.0.1:99999", "http://127.0.0.1:nan", "http://[::1", "http://a\n/"]
)
def test_an_address_that_cannot_be_is_one_line_with_its_form(stub: Stub, address: str) -> None:
    stub.base_url = address
    code, said = weft(stub, "balance")
    assert (code, said.startswith("Error: the server address"), "http://HOST:PORT" in said) == (1, True, True)


def test_a_key_with_a_space_is_no_key(stub: Stub) -> None:
    done = CliRunner().invoke(main, ["--base-url", stub.base_url, "--api-key", "tml- ", "balance"])
    assert (done.exit_code, "WEFT_API_KEY" in done.output) == (3, True)


@pytest.mark.parametrize(
    "arguments",
    [
        ["prices", "x" * 100_000],
        ["usage", "--run", "x:" + "y" * 100_000],
        ["trace", ""],
        ["publish", "tinker://s:train:0/weights/.."],
        ["set-ttl", "tinker://s:train:0/weights/w", "--seconds", str(2**63)],
    ],
    ids=["long model", "long run", "no session", "up", "beyond 64 bits"],
)
def test_what_no_request_can_carry_is_one_short_line(stub: Stub, arguments: list[str]) -> None:
    code, said = weft(stub, *arguments)
    assert (code, said.startswith("Error: "), said.count("\n"), len(said) < 300) == (2, True, 1, True)
    assert "validation error" not in said


def test_a_download_that_is_refused_leaves_no_folder(stub: Stub, tmp_path: Path) -> None:
    archive = "GET /training_runs/s:train:0/checkpoints/weights/w/archive"
    stub.replies[archive] = JSONResponse({"detail": "no"}, 404)
    assert weft(stub, "download", "tinker://s:train:0/weights/w", "--to", str(tmp_path / "x"))[0] == 4
    assert list(tmp_path.iterdir()) == []


def test_a_reader_that_has_seen_enough_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(*_: object) -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    monkeypatch.setattr(look, "show", closed)
    monkeypatch.setattr(RestClient, "get_balance", lambda _: APIFuture.start(asyncio.sleep(0)))
    done = CliRunner().invoke(main, ["--base-url", "http://127.0.0.1:1", "--api-key", "tml-x", "balance"])
    assert (done.exit_code, done.output) == (1, "")


@pytest.mark.parametrize("asked", [["--help"], ["--version"], ["runs", "--help"]])
def test_help_that_finds_no_room_is_one_line(monkeypatch: pytest.MonkeyPatch, asked: list[str]) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(click.decorators, "echo", full)
    done = CliRunner().invoke(main, asked)
    assert (done.exit_code, done.output) == (1, "Error: the output cannot be written: No space left on device\n")


def test_an_output_that_finds_no_room_has_its_exit_code_at_the_end_of_the_process() -> None:
    """Python writes what stdout holds once more at its end."""
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-c", "from weft.cli import main; main()", "version"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "Error: the output cannot be written: No space left on device\n")
