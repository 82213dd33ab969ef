from __future__ import annotations

import math
from pathlib import Path

import orjson
from weft import rl


def test_a_line_is_json_whatever_a_number_is(tmp_path: Path) -> None:
    """JSON has no NaN and no infinity, and readers other than Python's refuse them."""
    sink = rl.JsonLines(tmp_path / "steps.jsonl")
    sink.log(0, 1, {"reward": 0.5, "ratio": math.inf, "judged": math.nan})
    sink.close()
    [line] = (tmp_path / "steps.jsonl").read_bytes().splitlines()
    assert orjson.loads(line) == {"step": 0, "reward": 0.5, "ratio": None, "judged": None}
