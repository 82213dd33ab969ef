"""Random searches: from fixed seeds in every ordinary run, so that no run fails by chance, and from free ones under
`make soak`, many times as long. What a soak finds becomes a plain test.

`WEFT_SOAK` is how many times as long; 0 or absent: an ordinary run.
"""

from __future__ import annotations

import os
import random
import secrets

from hypothesis import settings

TIMES = int(os.environ.get("WEFT_SOAK", "0"))
SOAKING = TIMES > 0

#: No deadline: machines may be busy.
settings.register_profile("fixed seeds", deadline=None, derandomize=True, database=None)
settings.register_profile("soak", deadline=None, max_examples=100 * max(1, TIMES), print_blob=True)


def load_profile() -> None:
    """Before any test is imported: `@settings` takes what it does not name from the profile of that moment."""
    settings.load_profile("soak" if SOAKING else "fixed seeds")


def examples(count: int) -> int:
    """How many examples a search has that makes `count` in an ordinary run."""
    return count * max(1, TIMES)


def chance(seed: int) -> random.Random:
    """Random numbers for a search without Hypothesis. Their seed is printed, and so shown when a test fails."""
    if SOAKING:
        seed = secrets.randbits(64)
    print(f"seed {seed}")
    return random.Random(seed)
