"""The packages that `weft.rl` and the server's doors support, each in its own environment under `.rl-packages/`.

`python -m tests.rl_packages.environment [NAME...]` makes them; the tests of an environment run if it exists. verifiers
0.1 and 0.4 share a name and no code: 0.1 samples by our client, 0.4 by its own, which uses vLLM's API.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
HOME = ROOT / ".rl-packages"


@dataclass(frozen=True)
class Environment:
    """An environment. `proves` says what its tests do with each package, for docs/compatibility.md."""

    name: str
    packages: tuple[str, ...]
    proves: str

    @property
    def python(self) -> Path:
        return HOME / self.name / "bin" / "python"

    @property
    def stamp(self) -> Path:
        return HOME / self.name / ".complete"

    def build(self) -> None:
        """Make the environment, which takes up to 830 MB of disk."""
        self.stamp.unlink(missing_ok=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", str(HOME / self.name)], check=True)
        pip = [sys.executable, "-m", "pip", "--python", str(self.python), "install", "--quiet"]
        subprocess.run([*pip, *self.packages, "--editable", str(ROOT / "client_sdk")], check=True)
        self.stamp.touch()


VERIFIERS_0_1 = Environment(
    "verifiers-0.1",
    ("verifiers==0.1.14", "reasoning-gym==0.1.25", "renderers==0.1.12"),
    "`rl.verifiers` and `rl.reasoning_gym` roll out and train, and a renderer stands in for the chat template",
)
VERIFIERS_0_4 = Environment(
    "verifiers-0.4",
    ("verifiers==0.4.0", "renderers==0.1.12", "openai==2.54.0"),
    "its own TrainClient rolls out through `/inference/v1/generate`, and what it drew is trained by its session, which"
    " has to the bit what the client got; an agent of `openai` is trained",
)
SANDBOXES = Environment(
    "sandboxes",
    ("modal==1.6.4", "prime-sandboxes==0.5.1"),
    "each call of `rl.sandboxes.Modal` and `rl.sandboxes.Prime` is one that the client takes, answered by a stand-in:"
    " the providers themselves were not asked",
)
SINKS = Environment(
    "sinks",
    ("wandb==0.31.0", "trackio==0.43.0", "tensorboardX==2.6.5", "tensorboard==2.21.0"),
    "what `rl.Wandb` (offline), `rl.Trackio` and `rl.TensorBoard` write is read again, with each package's own reader"
    " or records",
)
_TALKS = "a tool is shown, called by the model, answered, and its result read (docs/openai.md)"
AGENTS = Environment(
    "agents",
    (
        *("openai-agents==0.24.0", "pydantic-ai-slim==2.68.0", "langchain-openai==1.7.3", "langgraph==1.2.22"),
        "openai==3.54.0",
    ),
    _TALKS,
)
LITELLM = Environment("litellm", ("litellm==1.106.2", "openai==2.54.0", "mcp==2.3.0"), _TALKS)
INSTRUCTOR = Environment("instructor", ("instructor==1.17.0", "openai==3.3.0"), "a typed answer, in its mode `MD_JSON`")
ENVIRONMENTS = {
    each.name: each for each in (VERIFIERS_0_1, VERIFIERS_0_4, SANDBOXES, SINKS, AGENTS, LITELLM, INSTRUCTOR)
}


if __name__ == "__main__":
    for name in sys.argv[1:] or ENVIRONMENTS:
        ENVIRONMENTS[name].build()
