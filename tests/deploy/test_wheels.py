"""The two distributions, built, installed into environments without the checkout, and used: a server, the client that
it hands out, a training loop, and a foreign package of the same import name.

The environments borrow what Weft requires from this one, whose editable Weft they do not see: `.pth` files of a
borrowed folder are not read.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
import urllib.request
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import weft_server
from tests.pages import blocks, runnable
from tests.servers import free_port

pytestmark = pytest.mark.server
ROOT = Path(__file__).parents[2]
CLEAN = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "WEFT_", "TINKER_"))}

#: Pages that are run in an environment with only the client.
GUIDES = (
    *(f"docs/guides/{name}.md" for name in ("sft", "dpo", "distillation", "from-tinker", "from-peft")),
    *("README.md", "docs/concepts.md", "docs/sdk.md", "docs/sampling.md", "docs/console.md", "docs/api.md"),
)
#: The loop of README.md, from nothing to a sampled answer.
LOOP = """
import weft
from weft import types

with weft.ServiceClient() as service:
    run = service.create_lora_training_client("weft/tiny-moe", rank=4)
    tokens = run.get_tokenizer().encode("3 + 5 = 8")
    inputs = {"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)}
    run.forward_backward([types.Datum(types.ModelInput.from_ints(tokens[:-1]), inputs)], "cross_entropy")
    run.optim_step(types.AdamParams(learning_rate=1e-3)).result()
    sampler = run.save_weights_and_get_sampling_client()
    params = types.SamplingParams(max_tokens=3, stop=[])
    print(len(sampler.sample(types.ModelInput.from_ints(tokens), 1, params).result().sequences[0].tokens))
"""


def required_by(distribution: str) -> set[str]:
    """The names of all distributions that a wheel requires, directly or not, without extras."""
    notes = metadata.PathDistribution(zipfile.Path(distribution, f"weft_tuning-{weft_server.__version__}.dist-info/"))
    waiting, found = list(notes.requires or []), set()
    while waiting:
        needed = Requirement(waiting.pop())
        if (needed.marker is None or needed.marker.evaluate({"extra": ""})) and needed.name not in found:
            found.add(needed.name)
            waiting += metadata.requires(needed.name) or []
    return found


class Environment:
    """A virtual environment in `folder`, outside of the checkout."""

    def __init__(self, folder: Path) -> None:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
        self.bin = folder / "bin"
        self.packages = next((folder / "lib").glob("python3*")) / "site-packages"
        (self.packages / "zz-borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")

    @classmethod
    def bare(cls, folder: Path, distribution: str) -> Environment:
        """An environment that borrows only what `distribution` requires, directly or not: no torch."""
        made = cls(folder)
        (made.packages / "zz-borrowed.pth").unlink()
        for name in required_by(distribution):
            for file in metadata.files(name) or []:
                top, there = file.parts[0], Path(str(file.locate()))
                if top not in ("..", "__pycache__") and not (made.packages / top).exists():
                    (made.packages / top).symlink_to(there.parents[len(file.parts) - 2] if file.parts[1:] else there)
        return made

    def install(self, *what: str) -> None:
        pip = [sys.executable, "-m", "pip", "--python", str(self.bin / "python"), "install", "--quiet", "--no-deps"]
        pip += ["--no-index", "--no-warn-script-location", "--ignore-installed"]  # borrowed ones are not installed
        subprocess.run([*pip, *what], check=True, env=CLEAN)

    def run(self, program: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        command = [str(self.bin / program), *arguments]
        where = {"cwd": self.packages.parent, "env": {**CLEAN, **environment}}
        return subprocess.run(command, capture_output=True, text=True, timeout=120, **where)  # type: ignore[call-overload]


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Both wheels, by the name of the distribution, built from a copy of the checkout."""
    folder = tmp_path_factory.mktemp("wheels")
    copy = folder / "checkout"
    ignored = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "tests", "docs", "demo-*")
    shutil.copytree(ROOT, copy, ignore=ignored)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir"]
    subprocess.run([*pip, str(folder), "./client_sdk", "."], cwd=copy, check=True, env=CLEAN)
    return {path.name.split("-")[0]: path for path in folder.glob("*.whl")}


@pytest.fixture(scope="module")
def installed(wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Environment:
    environment = Environment(tmp_path_factory.mktemp("installed") / "venv")
    environment.install(*map(str, wheels.values()))
    return environment


@pytest.fixture(scope="module")
def server(installed: Environment, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Start a server of the installed wheels; the environment variables by which a client reaches it."""
    data = ["--data-dir", str(tmp_path_factory.mktemp("data"))]
    command = [str(installed.bin / "weftd"), "serve", "--port", "0", *data]
    process = subprocess.Popen(command, cwd=installed.packages, env=CLEAN, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    line = process.stdout.readline().split()
    assert line[:1] == ["ready"]
    key = installed.run("weftd", "key", "create", *data, "--org", "acme").stdout.strip()
    yield {"WEFT_BASE_URL": line[1], "WEFT_API_KEY": key}
    process.terminate()
    assert process.wait(60) == 0


def test_versions_agree(wheels: dict[str, Path]) -> None:
    version = weft_server.__version__
    assert {path.name.split("-")[1] for path in wheels.values()} == {version}
    with zipfile.ZipFile(wheels["weft_tuning_server"]) as wheel:
        notes = wheel.read(f"weft_tuning_server-{version}.dist-info/METADATA").decode()
    assert f"Requires-Dist: weft-tuning=={version}" in notes.splitlines()


def test_an_installation_takes_two_names(installed: Environment) -> None:
    names = {path.name for path in installed.packages.iterdir() if path.is_dir() and path.suffix != ".dist-info"}
    assert names - {"__pycache__"} == {"weft", "weft_server"}
    done = installed.run("python", "-c", "import api")
    assert "No module named 'api'" in done.stderr


def test_a_loop_with_the_client_that_the_server_gives(server: dict[str, str], tmp_path: Path) -> None:
    url = server["WEFT_BASE_URL"]
    with urllib.request.urlopen(f"{url}/sdk/") as reply:
        link = re.search(r'href="([^"#]+\.whl)#', reply.read().decode())
    assert link is not None
    assert link[1] == f"/sdk/weft_tuning-{weft_server.__version__}-py3-none-any.whl"
    environment = Environment(tmp_path / "venv")
    environment.install(url + link[1])
    done = environment.run("python", "-c", LOOP, **server)
    assert (done.stdout, done.returncode) == ("3\n", 0), done.stderr
    assert environment.run("weft", "models", **server).stdout.count("weft/tiny-moe") == 1
    listed = Environment(tmp_path / "listed")
    listed.install("--find-links", f"{url}/sdk/", "weft-tuning")
    assert listed.run("python", "-c", "import weft; print(weft.__version__)").stdout.strip() == weft_server.__version__


@pytest.fixture(scope="module")
def bare(wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An environment with the client and what it requires."""
    environment = Environment.bare(tmp_path_factory.mktemp("bare") / "venv", str(wheels["weft_tuning"]))
    environment.install(str(wheels["weft_tuning"]))
    assert "No module named 'torch'" in environment.run("python", "-c", "import torch").stderr
    return environment


@pytest.mark.parametrize("example", ["rl_arithmetic.py", "sft_docs.py"])
def test_examples_need_the_client_alone(
    example: str, server: dict[str, str], bare: Environment, tmp_path: Path
) -> None:
    script = tmp_path / example
    script.write_text((ROOT / "examples" / example).read_text())
    done = bare.run("python", str(script), "--steps", "1", **server, WEFT_CACHE_DIR=str(tmp_path / "cache"))
    assert done.returncode == 0, done.stderr
    assert "PyTorch" not in done.stderr


def test_a_package_of_the_same_name_is_named(wheels: dict[str, Path], tmp_path: Path) -> None:
    stranger = tmp_path / "weft-7.1-py3-none-any.whl"
    files = {"weft/__init__.py": "", "weft-7.1.dist-info/METADATA": "Metadata-Version: 2.1\nName: weft\nVersion: 7.1\n"}
    files["weft-7.1.dist-info/WHEEL"] = "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files["weft-7.1.dist-info/RECORD"] = "".join(f"{name},,\n" for name in [*files, "weft-7.1.dist-info/RECORD"])
    with zipfile.ZipFile(stranger, "w") as wheel:
        for name, text in files.items():
            wheel.writestr(name, text)
    ours = [str(path) for path in wheels.values()]
    environment = Environment(tmp_path / "venv")
    environment.install(str(stranger))
    environment.install(*ours)
    done = environment.run("python", "-c", "import weft")
    assert "weft 7.1 and weft-tuning both install the package `weft`" in done.stderr
    assert "pip uninstall weft weft-tuning" in done.stderr
    environment.install("--force-reinstall", str(stranger))  # theirs overwrites ours, and the server says so
    done = environment.run("weftd", "--help")
    assert (done.returncode, "another package of the import name weft" in done.stderr) == (2, True), done.stderr


@pytest.mark.long  # it installs all that the client requires from a package index: a minute or two
@pytest.mark.timeout(900)
def test_a_stranger_pastes_the_pages(wheels: dict[str, Path], tmp_path: Path) -> None:
    """Without a checkout: docs/get-started.md from its first command to its last, then each guide in the environment
    that it made. Only the port and `make setup` are replaced."""
    set_up, *commands = blocks("docs/get-started.md")
    assert len(commanded(set_up.text + "".join(block.text for block in commands if block.language == "sh"))) + 1 <= 10
    port = str(free_port())
    Environment(tmp_path / ".venv").install(*map(str, wheels.values()))  # for `make setup`
    make, serve = commanded(set_up.text)
    assert make == "make setup"
    server = subprocess.Popen(["bash", "-c", f"exec {serve.replace('8000', port)}"], cwd=tmp_path, env=CLEAN)
    try:
        wait_for_port(int(port))
        shell = [block.text.replace("8000", port) for block in commands if block.language == "sh"]
        shell += pasted("get-started.py", "".join(block.text for block in commands if block.language == "python"))
        for page in GUIDES:
            shell += [*runnable(page, "sh"), *pasted(Path(page).stem + ".py", "\n".join(runnable(page, "python")))]
        script = ["bash", "-eux", "-c", "\n".join(shell)]
        done = subprocess.run(script, cwd=tmp_path, env=CLEAN, capture_output=True, text=True, timeout=800, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        assert re.search(r"^Lima", done.stdout, re.M)
        packages = subprocess.run(
            [tmp_path / "client/bin/pip", "list"], capture_output=True, text=True, check=True, env=CLEAN
        ).stdout
        assert "weft-tuning " in packages
        assert "torch" not in packages
    finally:
        server.terminate()
        assert server.wait(60) == 0


def commanded(shell: str) -> list[str]:
    """The commands of a script, one a line; a here-document stands without its body."""
    return [line for line in re.sub(r"(<<'END'\n).*?^END$", r"\1", shell, flags=re.S | re.M).splitlines() if line]


def pasted(name: str, program: str) -> list[str]:
    return [f"cat > {name} <<'PROGRAM'\n{program}PROGRAM", f"python {name}"]


def wait_for_port(port: int) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz").close()
            return
        except OSError:
            time.sleep(0.2)
    raise TimeoutError(port)
