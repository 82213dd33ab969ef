"""A finding of `weftd doctor`: what was looked at, how it is, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """`remedy` is "" if nothing has to be done."""

    about: str
    state: Literal["ok", "warning", "wrong"]
    says: str
    remedy: str = ""


def ok(about: str, says: str) -> Finding:
    return Finding(about, "ok", says)


def warning(about: str, says: str, remedy: str) -> Finding:
    return Finding(about, "warning", says, remedy)


def wrong(about: str, says: str, remedy: str) -> Finding:
    return Finding(about, "wrong", says, remedy)
