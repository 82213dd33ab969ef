"""Unknown names in a mixture are refused where they are written; the shares of tasks are those that were asked for."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from weft import rl
from weft.rl.loops.mixture import Tries, Try, mixture, ratios_of

ENV = rl.prompts(["a", "b"])
BOTH = {"sums": ENV, "code": rl.prompts(["c"])}


@pytest.mark.parametrize(
    ("env", "sources", "ratios", "says"),
    [
        (BOTH, {"sum": rl.Shuffled(2)}, None, "sources: there is no environment 'sum'; there is 'sums', 'code'"),
        (BOTH, rl.Shuffled(2), None, "sources: a mixture takes them by name: {'sums': ...}"),
        (ENV, {"sums": rl.Shuffled(2)}, None, "sources: there is no environment 'sums'; there is one without a name"),
        (BOTH, None, {"sums": 1, "codes": 1}, "ratios: there is no environment 'codes'"),
        (BOTH, None, {"sums": 1}, "ratios: no share for 'code'; 0 leaves an environment out"),
    ],
)
def test_refused_by_name(env: Any, sources: Any, ratios: Any, says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        ratios_of(mixture(env, sources, 0), ratios)


def test_each_draws_from_its_own_source() -> None:
    pools = rl.DifficultyPools(2)
    made = mixture(BOTH, {"sums": pools}, 0)
    assert made["sums"].source is pools
    tries = Tries(made, {"sums": 0, "code": 1})
    first, second = tries.draw(), tries.draw()
    state = json.loads(json.dumps({"pacer": {"numbers": 2}, **tries.state_dict([second])}))
    later = Tries(mixture(BOTH, None, 0), {"sums": 0, "code": 1})
    later.load_state_dict(state)
    assert [first.number, later.draw(), later.draw()] == [1, second, tries.draw()]
    old = Tries(mixture(BOTH, None, 0), {"sums": 0, "code": 1})
    old.load_state_dict({**state, "draws": 7, "again": [["code", 0], ["gone", 0]]})
    assert [old.draw(), old.draw().number] == [Try(8, "code", 0), 10]
    assert ratios_of(made, {"sums": 3, "code": 1}).shares == {"sums": 0.75, "code": 0.25}


def test_a_life_with_fewer_tasks_tries_those_alone_that_are_left() -> None:
    """Such as a file whose broken lines were taken out: the loop ended because all its groups failed."""
    many, few = rl.prompts(["?"] * 40), rl.prompts(["?"] * 3)
    first, pools = Tries(mixture(many, None, 0), None), rl.DifficultyPools(40)
    tried = [first.draw() for _ in range(40)]
    pools.means = dict.fromkeys(range(40), 0.5)
    state = {"pacer": {"numbers": 40}, **first.state_dict(tried)}
    later, fewer = Tries(mixture(few, None, 0), None), rl.DifficultyPools(3)
    later.load_state_dict(state)
    fewer.load_state_dict(pools.state_dict())
    assert [later.draw() for _ in range(3)] == sorted(each for each in tried if each.index < 3)
    assert all(later.draw().index < 3 for _ in range(9))
    assert fewer.metrics() == {"pool/hard": 0.0, "pool/normal": 1.0, "pool/easy": 0.0, "pool/unseen": 0.0}


def test_a_source_of_another_kind_than_the_earlier_lifes_begins_anew(caplog: pytest.LogCaptureFixture) -> None:
    first = Tries(mixture(ENV, None, 0), None)
    pools = rl.DifficultyPools(2)
    later = Tries(mixture(ENV, pools, 0), None)
    later.load_state_dict({"pacer": {"numbers": 0}, **first.state_dict([first.draw()])})
    assert caplog.messages == [
        "the source '' begins anew: an earlier life's was no DifficultyPools ('packed' is missing)"
    ]
    assert pools.means == {}
