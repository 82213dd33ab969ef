"""`weft.rl` is light: torch and the packages of environments are imported only when something needs them."""

from __future__ import annotations

import subprocess
import sys

import pytest
from weft import rl

HEAVY = ("torch", "transformers", "verifiers", "reasoning_gym", "renderers", "wandb")


def test_nothing_heavy_is_imported_with_it() -> None:
    code = (
        "import sys; from weft import rl\n"
        "for name in rl.__all__: getattr(rl, name)\n"
        "rl.losses.ppo(), rl.losses.dppo_kl()\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: rl.reasoning_gym("leg_counting"), "pip install reasoning-gym"),
        (lambda: rl.verifiers(object()), "pip install 'verifiers<0.2'"),
        (lambda: rl.Wandb(project="x"), "pip install wandb"),
        (lambda: rl.Trackio(project="x"), "pip install trackio"),
        (lambda: rl.TensorBoard("x"), "pip install tensorboardX"),
    ],
)
def test_what_is_missing_is_named(make, says, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("reasoning_gym", "verifiers", "verifiers.clients", "wandb", "trackio", "tensorboardX"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=says):
        make()


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'grpoo'"):
        _ = rl.grpoo
