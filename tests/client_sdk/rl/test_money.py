"""What a loop's lives have spent is added up."""

from __future__ import annotations

from weft.rl.chat.purse import Purse
from weft.rl.loops.money import paid_elsewhere


def test_what_several_lives_pay_on_one_run_is_added() -> None:
    purse = Purse({}, elsewhere_nusd=6)
    assert paid_elsewhere(purse, {"one": 5, "two": 3}, "one") == {"one": 11, "two": 3}
    assert paid_elsewhere(purse, {"two": 3}, "one") == {"one": 6, "two": 3}
