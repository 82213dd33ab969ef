"""Where recipes run: an environment of their own, stand-ins for the hub, and a server with a known model name.

The cookbook knows models only by their names on the hub, so the tiny model is served as `Qwen/Qwen3-8B`, and a random
one of each family as one of its checkpoints. Libraries prefer a folder of that name in the working directory to the
hub; the same holds for data sets.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

from tests.e2e.conftest import Weftd
from tests.e2e.test_models import save
from tests.workers.model.models import FAMILIES, reference
from workers.model.families.table import FAMILIES as TABLE
from workers.model.tiny import TINY_PATH

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".cookbook"
MODEL = "Qwen/Qwen3-8B"
HYBRID = "Qwen/Qwen3.5-4B"
#: Other families, by their names in docs/models.md: a checkpoint's name on the hub, and the tiny random model
#: (tests/workers/model/models.py) that is served under that name.
OTHERS = {
    TABLE[FAMILIES[tiny][0].__name__].name: (TABLE[FAMILIES[tiny][0].__name__].checkpoints[-1], tiny)
    for tiny in (
        *("qwen3", "llama", "qwen2", "mistral", "mixtral", "olmoe", "glm4-moe", "deepseek", "glm4-moe-lite", "bailing"),
        *("gpt-oss", "qwen3-next", "qwen3.5-moe", "nemotron-h"),
    )
}
_RANDOM = {HYBRID: "qwen3.5", **dict(OTHERS.values())}

#: The cookbook asks for a tml-renderers that Python 3.11 does not have, and needs it only for models we do not serve.
PACKAGES = (
    "tinker==0.38.0",
    "transformers>=4.57.6,<=5.5.4,!=5.4.*",
    *("peft", "safetensors", "datasets", "pyrage", "tml-renderers", "aiohttp", "anyio", "blobfile", "chz"),
    *("cloudpickle", "pillow", "pydantic", "rich", "termcolor", "tiktoken", "tqdm"),
    *("sympy", "pylatexenc", "math-verify"),
)
COOKBOOK = "tinker_cookbook==0.6.1"


def build() -> Path:
    """The Python of the cookbook's environment, which is made if it does not exist. It borrows our torch."""
    python, stamp = FOLDER / "bin" / "python", FOLDER / ".complete"
    if not stamp.exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", str(FOLDER)], check=True)
        packages = next((FOLDER / "lib").glob("python3*")) / "site-packages"
        (packages / "zz-borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
        pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
        subprocess.run([*pip, *PACKAGES], check=True, stderr=subprocess.DEVNULL)
        subprocess.run([*pip, "--no-deps", COOKBOOK], check=True)
        stamp.touch()
    return python


def serve(folder: Path, models: Iterable[str]) -> Weftd:
    """Run a server with these models."""
    paths = {name: folder / "models" / name if name in _RANDOM else TINY_PATH for name in models}
    for name in paths.keys() & _RANDOM.keys():
        save(paths[name], reference(_RANDOM[name], vocab_size=1560, max_position_embeddings=512))
    return Weftd(folder, *(word for name, path in paths.items() for word in ("--model", f"{name}={path}"))).start()


def shadow(folder: Path) -> Path:
    """Make a working directory in which the hub's names are local folders."""
    for name in (MODEL, *_RANDOM):  # only its tokenizer is read
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).symlink_to(TINY_PATH)
    robots = [{"messages": _talk(i)} for i in range(32)]
    _write(folder / "HuggingFaceH4/no_robots/train.jsonl", robots)
    _write(folder / "HuggingFaceH4/no_robots/test.jsonl", robots[:4])
    _write(folder / "conversations.jsonl", robots)
    sums = [{"question": f"What is {i} + {i + 1}?", "answer": f"#### {2 * i + 1}"} for i in range(32)]
    _write(folder / "openai/gsm8k/main/train.jsonl", sums)
    _write(folder / "openai/gsm8k/main/test.jsonl", sums[:4])
    (folder / "openai/gsm8k/README.md").write_text(_GSM8K)
    _write(folder / "zwhe99/DeepMath-103K/train.jsonl", [{"question": row["question"]} for row in sums])
    _write(folder / "comparisons.jsonl", [_comparison(i) for i in range(16)])
    return folder


def environment(server: Weftd) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TINKER_", "PYTHON", "HF_"))}
    return {
        **kept,
        "TINKER_BASE_URL": server.url,
        "TINKER_API_KEY": server.key("cookbook"),
        "TINKER_TELEMETRY": "0",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_HOME": str(server.data_dir.parent / "hub"),
        "TOKENIZERS_PARALLELISM": "false",
    }


_GSM8K = """\
---
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train.jsonl
  - split: test
    path: main/test.jsonl
---
"""


def _talk(index: int) -> list[dict[str, str]]:
    asked = {"role": "user", "content": f"What is {index} + 2?"}
    return [asked, {"role": "assistant", "content": f"{index + 2}"}]


def _comparison(index: int) -> dict[str, object]:
    """A labelled comparison in which the right sum is preferred."""
    asked, right = _talk(index)
    wrong = {"role": "assistant", "content": f"{index + 3}"}
    return {
        "comparison": {"prompt_conversation": [asked], "completion_A": [right], "completion_B": [wrong]},
        "label": "A",
    }


def _write(path: Path, rows: list[dict[str, object]] | list[dict[str, str]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
