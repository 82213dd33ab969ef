"""The command weftd: its help, mistakes in one line on stderr, and what it loads."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from weft.version import __version__

from api.cli import COMMANDS, main, weftd as command
from tests.api.stand_in import ROOT, refused


@pytest.mark.parametrize(
    ("arguments", "config", "message"),
    [
        (["--model", "m=/nonexistent/folder"], "", "/nonexistent/folder"),
        (["--model", "m"], "", "not NAME=PATH"),
        (["--model", "m=/a", "--model", "m=/b"], "", "named twice"),
        (["--prot", "1"], "", "--prot"),
        (["--host", "no.such.host.invalid"], "", r"no\.such\.host\.invalid: .*; host is an address of this machine"),
        (
            ["--host", "192.0.2.1"],
            "",
            "cannot listen on 192.0.2.1 .*; host is an address of this machine, or 0.0.0.0 for",
        ),
        ([], "prot = 1", "prot"),
        ([], "[[prices]]\nversion = 'x'", "effective_from"),
        ([], "database_url = 'sqlite:////nonexistent/weft.db'", "unable to open"),
    ],
)
def test_mistakes_are_one_line(tmp_path: Path, arguments: Sequence[str], config: str, message: str) -> None:
    file = tmp_path / "weft.toml"
    file.write_text(config)
    line = refused("serve", "--data-dir", str(tmp_path), "--config", str(file), "--port", "0", *arguments)
    assert re.search(message, line)
    assert re.fullmatch(r"weftd: [^\n]+\n", line)


LONG, NOT_UTF8 = "n" * 300, os.fsdecode(b"\xff\xfe")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["backup", ""], "TARGET: name a new folder"),
        (["backup", "/"], "TARGET: name a new folder"),
        (["backup", LONG], "n{300}: File name too long"),
        (["org", "list", "--data-dir", LONG], "n{300}.*: File name too long"),
        (["credit", "grant", "--org", NOT_UTF8, "--usd", "1"], r"'\\udcff\\udcfe' is not UTF-8"),
        (["tco", "--gpu-hour", "nan"], "--gpu-hour.*nan"),
        (["tco", "--gpu-hour", "inf"], "--gpu-hour.*inf"),
        (["simulate", "--hours", "nan"], "--hours.*nan"),
        (["simulate", "--plot", "waits.pdf"], r"--plot: name a file that ends in \.png or \.svg"),
        (["plan", "--model", "m", "--gpu-gib", "nan"], "--gpu-gib.*nan"),
        (["tco", "--gpu-hour", "1e308"], r"--gpu-hour.*1e\+308 is not in the range"),
        (["simulate", "--gpu-hour", "1e308"], r"--gpu-hour.*1e\+308 is not in the range"),
        (["simulate", "--model", "m", "--gpu-gib", "1e308"], r"--gpu-gib.*1e\+308 is not in the range"),
        (["simulate", "--model", "m", "--busiest", "1e308"], r"--busiest.*1e\+308 is not in the range"),
        (["backup", "/proc/x"], "/proc/x.partial: .*: name a folder"),
        (["migrate", "--data-dir", "/proc/x"], "data folder /proc/x: .*: name a folder"),
        (["serve", "--data-dir", "/dev/null"], "data folder /dev/null: .*: name a folder"),
        (["org", "limits", "acme", "--max-in-flight", "9" * 30], "is not in the range 0<=x<=2147483647"),
        (["tco", "--gpus", "9" * 400], "is not in the range 1<=x<=100000"),
        (["billing", "mode", "--org", "acme"], "Choose from: prepaid, postpaid, unlimited"),
    ],
)
def test_what_no_file_number_or_text_can_be_is_one_line(tmp_path: Path, arguments: list[str], message: str) -> None:
    (tmp_path / "weft.db").touch()
    of = [] if "--data-dir" in arguments or arguments[0] in ("simulate", "plan") else ["--data-dir", str(tmp_path)]
    line = refused(*arguments, *of)
    assert re.fullmatch(r"weftd: [^\n]+\n", line)
    assert re.search(message, line)


HELP = """
import click, sys
from click.testing import CliRunner
from api.cli import COMMANDS, weftd
print(CliRunner().invoke(weftd, ["--help"]).output)
assert not {"numpy", "sqlalchemy", "fastapi", "httpx", "pydantic", "asyncio"} & set(sys.modules), "loaded for help"
for name in {*COMMANDS} - {"doctor"}:  # which looks at everything
    weftd.get_command(click.Context(weftd), name)
assert not {"numpy", "torch", "fastapi", "httpx"} & set(sys.modules), "loaded before anything is computed"
"""


def test_help_names_every_command_and_loads_none() -> None:
    out = subprocess.run([sys.executable, "-c", HELP], capture_output=True, text=True, cwd=ROOT, timeout=60, check=True)
    told = re.findall(r"^  (\w+) {2,}\w.*\.$", out.stdout, re.MULTILINE)
    assert told == sorted([*COMMANDS, "serve"])


def test_help_that_finds_no_room_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(click.decorators, "echo", full)
    monkeypatch.setattr(sys, "argv", ["weftd", "--help"])
    with pytest.raises(SystemExit, match="1"):
        main()
    assert capsys.readouterr().err == "weftd: the output cannot be written: No space left on device\n"


def test_a_folder_without_a_model_is_named_once(tmp_path: Path) -> None:
    done = CliRunner().invoke(command, ["simulate", "--gpus", "2", "--model", str(tmp_path)])
    assert (done.exit_code, done.output.count(str(tmp_path))) == (2, 1)


@pytest.mark.parametrize(("argument", "output", "code"), [("--version", "stdout", 1), ("--no-such", "stderr", 2)])
def test_an_output_that_finds_no_room_has_its_exit_code_at_the_end_of_the_process(
    argument: str, output: str, code: int
) -> None:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "api.cli", argument]
        done = subprocess.run(command, **(pipes | {output: full}), text=True, check=False)  # type: ignore[call-overload]
    assert (done.returncode, (done.stderr or "\n").count("\n")) == (code, 1)


@pytest.mark.parametrize("output", ["stdout", "stderr"])
def test_a_process_ends_with_its_own_code_whatever_its_outputs_could_not_take(output: str) -> None:
    said = f"import sys\nfrom workers.leave import leave, let_go\nsys.{output}.write('lost')\n"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with open("/dev/full", "w") as full:
        for end in ("let_go()", "leave(0)"):
            command = [sys.executable, "-c", said + end]
            assert subprocess.call(command, cwd=ROOT, env=environment, **{output: full}) == 0  # type: ignore[arg-type]


CHILD_OF_MAIN = """
import os, subprocess, sys
from api.cli import main
sys.argv = ["weftd", "--version"]
main()
null = os.stat(os.devnull)
sys.exit(subprocess.call([sys.executable, "-c", "import sys; sys.exit(None in (sys.stdin, sys.stdout, sys.stderr))"])
    or not all(os.path.samestat(os.fstat(number), null) for number in range(3)))
"""


def test_workers_of_a_server_without_outputs_have_outputs() -> None:
    closed = ["sh", "-c", '"$0" -c "$1" <&- >&- 2>&-', sys.executable, CHILD_OF_MAIN]
    assert subprocess.call(closed, cwd=ROOT) == 0


def test_its_version_is_its_client_s() -> None:
    assert CliRunner().invoke(command, ["--version"]).output == f"weftd {__version__}\n"
