"""What clients that wait for a worker are told: who is there, who loads, and since when nobody has the model."""

from __future__ import annotations

import pytest

from scheduler.order.presence import GRACE_S, Presence, Present, queued_for

LONG_S = GRACE_S + 1
NONE = "no generator here has its base model m: it waits until one has"
LATELY = ". None has had it, or was loading it, for 31 s: ask the operator for one"
TOLD = {
    "it is there": (Present(True, True, None, 0), "waiting for the generator, which is busy; it is next", False),
    "the server starts": (Present(), "waiting for the generator, which is starting; it is next", False),
    "one loads": (
        Present(loading_s=70, missing_s=LONG_S),
        "waiting for the generator, which is starting: it has been loading m for 70 s; it is next",
        False,
    ),
    "others are there, the server starts": (Present(here=True), NONE, False),
    "others are there": (Present(here=True, missing_s=LONG_S), NONE + LATELY, True),
    "nobody": (Present(missing_s=LONG_S), NONE + LATELY, True),
}


@pytest.mark.parametrize("case", TOLD)
def test_what_is_told(case: str) -> None:
    present, reason, unserved = TOLD[case]
    told = queued_for("generator", 0, "m", present)
    assert (told.reason, told.unserved) == (reason, unserved)
    assert told.state == ("active" if present.serves else "paused_capacity")


def test_a_model_is_missing_since_the_start_or_since_it_was_last_seen() -> None:
    now = [100.0]
    presence = Presence(lambda: now[0])
    now[0] += 10
    presence.saw(["m"])
    now[0] += 5
    assert [presence.missing_s(model) for model in ("m", "other")] == [5, 15]
    presence.forget()
    assert presence.missing_s("m") == 0
