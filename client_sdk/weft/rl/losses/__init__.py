"""The losses of RL by name: those that the server has, and those that it runs as uploaded graphs, each in one pass."""

from weft.rl.losses.loss import Loss, cispo, cross_entropy, dro, importance_sampling, ppo, stable_reinforce
from weft.rl.losses.traced import (
    areal,
    clipped_is,
    dppo_kl,
    gspo,
    icepop,
    intellect3,
    ipo,
    mixed,
    opsm,
    ppo_clip,
    ref_kl,
    sapo,
    tis,
)

__all__ = [
    "Loss",
    "areal",
    "cispo",
    "clipped_is",
    "cross_entropy",
    "dppo_kl",
    "dro",
    "gspo",
    "icepop",
    "importance_sampling",
    "intellect3",
    "ipo",
    "mixed",
    "opsm",
    "ppo",
    "ppo_clip",
    "ref_kl",
    "sapo",
    "stable_reinforce",
    "tis",
]
