"""What the check of losses and their inputs says, and that it runs without torch."""

import subprocess
import sys

import numpy as np
import pytest

from workers.trainer.loss_inputs import LossInputError, check_loss


def rl(**more):
    return {
        "target_tokens": np.array([1, 2]),
        "logprobs": np.array([-1.0, -2.0], np.float32),
        "advantages": np.array([1.0, 0.0], np.float32),
        **more,
    }


CE = {"target_tokens": np.array([1, 2]), "weights": np.ones(2, np.float32)}


def test_accepts() -> None:
    check_loss("cross_entropy", {}, [CE], [2])
    check_loss("cross_entropy", {}, [{"target_tokens": np.ones((2, 3), np.int64), "weights": np.ones((2, 3))}], [2])
    check_loss("ppo", {"clip_low_threshold": 0.9}, [rl(clip_high_threshold=np.array([1.0, 1.5]))], [2])
    check_loss("importance_sampling", {}, [rl(weights=np.ones(2), mask=np.ones(2))], [2])


@pytest.mark.parametrize(
    ("loss_fn", "config", "datum", "words"),
    [
        ("sft", {}, CE, "unknown loss_fn 'sft'"),
        ("ppo", {"clip_low": 0.5}, rl(), "unknown loss_fn_config key 'clip_low'"),
        ("importance_sampling", {"clip_low_threshold": 0.5}, rl(), "takes none"),
        ("ppo", {"clip_low_threshold": "0.5"}, rl(), "finite number"),
        ("ppo", {"clip_low_threshold": 2.0}, rl(), "above clip_high_threshold"),
        ("ppo", {}, CE, "datum 1: ppo needs the input 'logprobs'"),
        ("cross_entropy", {}, rl(), "cross_entropy needs the input 'weights'"),
        ("cross_entropy", {}, CE | {"mask": np.ones(2)}, "unknown input 'mask'"),
        ("ppo", {}, rl(advantages=np.ones(3)), r"'advantages' has shape \(3,\)"),
        ("ppo", {}, rl(advantages=np.array([1.0, np.nan])), "'advantages' is nan at element 1"),
        ("cross_entropy", {}, CE | {"weights": np.array([np.inf, 1])}, "'weights' is inf at element 0"),
        ("cross_entropy", {}, CE | {"target_tokens": np.array([1.0, 2.0])}, "must be integers"),
        ("cross_entropy", {}, CE | {"target_tokens": np.array([1, -2])}, "negative id -2"),
        ("ppo", {}, {k: v[:, None] for k, v in rl().items()}, r"must have shape \[N\]"),
        ("ppo", {"clip_low_threshold": 0.5}, rl(clip_low_threshold=np.ones(2)), "both in loss_fn_config and"),
        ("ppo", {}, rl(clip_low_threshold=np.array([0.5, 1.5])), "above 'clip_high_threshold'"),
        ("dro", {"beta": -0.1}, rl(), "'beta' must be a finite number >= 0"),
        ("dro", {"kl_coeff": 0.1}, rl(), "dro takes beta"),
        ("gspo", {}, rl(), "gspo needs the input 'sequence_ratio_mask'"),
        ("gspo", {}, rl(sequence_ratio_mask=np.zeros(2)), "marks no position"),
        ("stable_reinforce", {"beta": 0.1}, rl(), "stable_reinforce takes clip_low_threshold"),
    ],
)
def test_refuses_by_name(loss_fn, config, datum, words) -> None:
    good = CE if loss_fn == "cross_entropy" else rl()
    good = good | ({"sequence_ratio_mask": np.ones(2)} if loss_fn == "gspo" else {})
    with pytest.raises(LossInputError, match=words):
        check_loss(loss_fn, config, [good, datum])


def test_refuses_targets_that_do_not_match_the_tokens() -> None:
    with pytest.raises(LossInputError, match="datum 0: 'target_tokens' has 2 positions, the model input 5"):
        check_loss("cross_entropy", {}, [CE], [5])


def test_imports_no_torch() -> None:
    code = "import sys, workers.trainer.loss_inputs; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
