"""What the start-up test asks of a decoder, what it concludes, and how long that holds. The decoder here has two small
weights, and its products are made to fail. test_probe_rows.py tests how results are compared."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from workers.model import isolation
from workers.model.config import GateConfig
from workers.model.isolation import Isolation, choose, once, probe
from workers.model.native.build import library
from workers.model.parts.gated_delta import GatedDelta

CPU = torch.device("cpu")


def decoder(*weights: Tensor, **config: Any) -> Any:
    """The parts of a decoder that the probe reads. `config` changes that of one without MLPs, experts, gates or
    recurrences."""
    plain = {"mlp_widths": (), "num_experts": 0, "gate_widths": (), "output_gate": False, "shared_gate": False}
    plain |= {"gate": GateConfig(), "router": SimpleNamespace(scores="softmax"), "recurrence": None}
    embed, *products = weights or (torch.ones(24, 40), torch.ones(40, 40))
    return SimpleNamespace(
        device=CPU,
        embed=embed,
        layers=[],
        modules=list,
        isolation="",
        products=lambda: products,
        parts_of_products=lambda: [],
        config=SimpleNamespace(**plain | config),
    )


def twice(x: Tensor, *_: object, **__: object) -> Tensor:
    """Doubles each number, whatever else is in the batch."""
    return x * 2


def fickle(rows: int) -> Callable[..., Tensor]:
    """Like `twice`, but with other results for a batch of so many rows."""
    return lambda x, *_, **__: x * 2 + (len(x) == rows)


@pytest.fixture(autouse=True)
def steady(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every library is exact, until a test says otherwise."""
    for name in ("base_mm", "sigmoid_of"):
        monkeypatch.setattr(isolation, name, twice)
    monkeypatch.setattr(isolation, "_activation", lambda config, x: x * 2)
    monkeypatch.setattr(isolation, "_depends_on_alignment", lambda width, device: False)


# ---- what is asked of a decoder


def reason(of: Any) -> str:
    found = choose(of)
    assert found.mode == ("per-segment" if found.reason else "padded")
    assert found.shapes == len(isolation._shapes(of))
    return found.reason


def test_exact_libraries_are_packed() -> None:
    config = {"mlp_widths": (8,), "num_experts": 4, "gate_widths": (6, 1)}
    assert choose(decoder(**config)) == Isolation("padded", 2)


@pytest.mark.parametrize(
    ("shape", "transposed", "inner", "name"),
    [([24, 40], False, 40, "x W^T"), ([24, 40], True, 24, "x W"), ([40, 40], True, 40, "x W")],
)
def test_each_weight_is_tried_in_both_directions(
    monkeypatch: pytest.MonkeyPatch, shape: list[int], transposed: bool, inner: int, name: str
) -> None:
    def base_mm(x: Tensor, weight: Tensor, **how: bool) -> Tensor:
        assert x.shape[1] == weight.shape[0 if how["transposed"] else 1]
        bad = how == {"transposed": transposed} and list(weight.shape) == shape
        assert not bad or x.shape[1] == inner
        return x * 2 + (bad and len(x) == 33)

    monkeypatch.setattr(isolation, "base_mm", base_mm)
    assert reason(decoder()) == f"{name} with {shape} gives 33 rows other bits than 1531"


@pytest.mark.parametrize(("most", "rows"), [(960 * 50 + 959, 50), (1, 16), (960 * 5000, 1531)])
def test_a_large_product_is_tried_with_fewer_rows(monkeypatch: pytest.MonkeyPatch, most: int, rows: int) -> None:
    """A weight of [24, 40] has 960 numbers to multiply for each row."""
    monkeypatch.setattr(isolation, "MAX_MULTIPLICATIONS", most)
    monkeypatch.setattr(isolation, "base_mm", fickle(7))
    assert reason(decoder(torch.ones(24, 40))) == f"x W^T with [24, 40] gives 7 rows other bits than {rows}"


def test_each_width_is_tried_for_alignment_but_those_of_whole_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(isolation, "_depends_on_alignment", lambda width, device: asked.append(width))
    assert reason(decoder()) == ""
    assert sorted(asked) == [24, 40]
    asked.clear()
    monkeypatch.setattr(isolation, "MAX_ALIGNED_WIDTH", 24)
    assert reason(decoder()) == ""
    assert asked == [24]
    monkeypatch.setattr(isolation, "_depends_on_alignment", lambda width, device: width == 24)
    assert reason(decoder()) == "products of rows of 24 depend on where in memory they lie"


@pytest.mark.parametrize(("gate", "wide"), [(GateConfig(), 16), (GateConfig(gated=False), 8)])
def test_what_an_mlp_computes_between_its_products(
    monkeypatch: pytest.MonkeyPatch, gate: GateConfig, wide: int
) -> None:
    """With gate and up side by side, or up alone."""

    def activation(config: GateConfig, x: Tensor) -> Tensor:
        assert config is gate
        return x * 2 + (x.shape[1] == wide and len(x) == 31)

    monkeypatch.setattr(isolation, "_activation", activation)
    assert reason(decoder(mlp_widths=(5,), gate=gate)) == ""
    assert reason(decoder(mlp_widths=(5, 8), gate=gate)) == "silu over rows of 8 gives 31 rows other bits than 1531"


@pytest.mark.parametrize(
    ("scores", "experts", "found"),
    [
        ("".join(["sig", "moid"]), 12, "sigmoid over rows of 12 gives 17 rows other bits than 1531"),
        ("softmax", 12, ""),
        ("sigmoid", 0, ""),
    ],
)
def test_a_router_of_sigmoids(monkeypatch: pytest.MonkeyPatch, scores: str, experts: int, found: str) -> None:
    monkeypatch.setattr(
        isolation, "sigmoid_of", lambda x, lora: x * 2 + (x.shape[1] == experts and len(x) == 17 and lora is None)
    )
    assert reason(decoder(num_experts=experts, router=SimpleNamespace(scores=scores))) == found


def test_sigmoids_that_are_gates(monkeypatch: pytest.MonkeyPatch) -> None:
    def sigmoid_of(x: Tensor, lora: object) -> Tensor:
        assert lora is None
        return x * 2 + (x.shape[1] == 6 and len(x) == 3)

    monkeypatch.setattr(isolation, "sigmoid_of", sigmoid_of)
    assert reason(decoder(gate_widths=(1,))) == ""
    assert reason(decoder(gate_widths=(1, 6))) == "a gate of 6 gives 3 rows other bits than 1531"


class Recurrence(GatedDelta):
    """A recurrence whose step gives 24 rows other bits. Each row must come with the state that a run left."""

    def __init__(self, bad: int) -> None:
        self.inputs = torch.ones(8, 3)  # type: ignore[assignment]
        self._bad, self._state = bad, object()

    def run(self, x: Tensor, state: object) -> Any:
        assert x.shape[1] == 8
        assert len(x) > 1
        assert state is None
        return x, self._state

    def step(self, x: Tensor, states: list[object]) -> Any:  # type: ignore[override]
        assert states == [self._state] * len(x)
        assert x.shape[1] == 8
        return x * 2 + (len(x) == self._bad), None


@pytest.mark.parametrize(("bad", "found"), [(24, "a step of a recurrence gives 24 rows other bits than 36"), (99, "")])
def test_a_step_of_a_recurrence(bad: int, found: str) -> None:
    of = decoder()
    of.layers = [SimpleNamespace(attn=object()), SimpleNamespace(attn=Recurrence(bad))]
    assert reason(of) == found


def test_a_shape_is_tried_once_and_experts_by_one_of_them() -> None:
    experts = torch.arange(3 * 24 * 8.0).reshape(3, 24, 8)
    like_others = torch.zeros(5, 24, 40)
    of = decoder(torch.ones(24, 40), torch.zeros(24, 40), like_others, torch.ones(40, 24), experts, experts + 1)
    shapes = isolation._shapes(of)
    assert [list(weight.shape) for weight in shapes] == [[24, 40], [40, 24], [24, 8]]
    assert torch.equal(shapes[0], torch.ones(24, 40))
    assert torch.equal(shapes[2], experts[0])


def test_parts_of_products_are_tried_unless_the_weights_are_sharded() -> None:
    of = decoder(torch.ones(24, 40))
    of.parts_of_products = lambda: [torch.ones(12, 40)]
    assert [list(weight.shape) for weight in isolation._shapes(of)] == [[24, 40], [12, 40]]
    sharded: Any = SimpleNamespace(shape=torch.Size([24, 40]), full_tensor=lambda: torch.ones(24, 40))
    of.embed = sharded
    assert [type(weight) for weight in isolation._shapes(of)] == [Tensor]


# ---- what is kept of it


def test_the_finding_is_the_decoders(monkeypatch: pytest.MonkeyPatch) -> None:
    of = decoder()
    assert (probe(of).mode, of.isolation) == ("padded", "padded")
    monkeypatch.setattr(isolation, "base_mm", fickle(33))
    assert (probe(of).mode, of.isolation) == ("per-segment", "per-segment")


def test_a_gpu_is_packed_and_nothing_is_kept(tmp_path: Path) -> None:
    of = decoder()
    of.device = torch.device("meta")
    assert probe(of, tmp_path / "kept") == Isolation("packed-inexact", 0)
    assert of.isolation == "packed-inexact"
    assert not (tmp_path / "kept").exists()


def test_the_text_of_each_finding() -> None:
    assert str(Isolation("packed-inexact", 0)) == "packed (on a GPU: equal up to rounding, not to the bit)"
    assert str(Isolation("padded", 7)) == "packed (rows of 7 weight shapes do not depend on their neighbours)"
    assert str(Isolation("per-segment", 7, "why")) == "group by group, which is slower (why)"


def tried(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    trials: list[int] = []

    def trial(of: object, shapes: list[Tensor]) -> Isolation:
        trials.append(len(shapes))
        return Isolation("per-segment", len(shapes), "a difference")

    monkeypatch.setattr(isolation, "choose", trial)
    return trials


OTHERS: dict[str, Any] = {
    "mlp_widths": (8,),
    "gate": GateConfig(gated=False),
    "router": SimpleNamespace(scores="sigmoid"),
    "num_experts": 4,
    "output_gate": True,
    "shared_gate": True,
    "recurrence": "gated delta",
}


@pytest.mark.parametrize("field", OTHERS)
def test_a_finding_holds_for_a_model_alike_in_all_that_is_tried(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, field: str
) -> None:
    trials = tried(monkeypatch)
    found = [probe(decoder(), tmp_path), probe(decoder(), tmp_path)]
    assert found == [Isolation("per-segment", 2, "a difference")] * 2
    assert trials == [2]
    probe(decoder(**{field: OTHERS[field]}), tmp_path)
    assert trials == [2, 2]


def test_a_finding_holds_for_weights_of_its_shapes_and_types(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    trials = tried(monkeypatch)
    plain = torch.ones(24, 40)
    for weight in (plain, plain.bfloat16(), torch.ones(24, 41), torch.zeros(24, 40)):
        probe(decoder(weight), tmp_path)
    assert len(trials) == 3
    monkeypatch.setattr(isolation, "packed", lambda weight: object())
    probe(decoder(plain), tmp_path)
    assert len(trials) == 4
    other = None if library(Path(isolation.__file__).parent / "native/recur.c") is not None else "compiled"
    monkeypatch.setattr(isolation, "library", lambda source: other)
    probe(decoder(plain), tmp_path)
    assert len(trials) == 5


@pytest.fixture
def count(tmp_path: Path) -> Callable[[], int]:
    """The number of trials that asking `once` again took."""
    trials: list[int] = []

    def trial() -> Isolation:
        trials.append(1)
        return Isolation("padded", 3)

    def ask() -> int:
        assert once(tmp_path / "kept", "the weights", trial) == Isolation("padded", 3)
        return len(trials)

    return ask


@pytest.mark.parametrize("name", [f"{prefix}ANY" for prefix in isolation._LIBRARIES if prefix.endswith("_")])
def test_a_finding_holds_for_the_same_settings_of_the_libraries(
    monkeypatch: pytest.MonkeyPatch, count: Callable[[], int], name: str
) -> None:
    assert [count(), count()] == [1, 1]
    monkeypatch.setenv("WEFT_ANY", "1")
    assert count() == 1
    monkeypatch.setenv(name, "1")
    assert count() == 2
    monkeypatch.setenv(name, "2")
    assert count() == 3
    monkeypatch.delenv(name)
    assert count() == 3


def test_a_finding_holds_for_the_same_torch_threads_processor_and_code(
    monkeypatch: pytest.MonkeyPatch, count: Callable[[], int], tmp_path: Path
) -> None:
    assert count() == 1
    for number, (of, name, other) in enumerate(
        [
            (torch, "__version__", "9.9"),
            (torch.__config__, "show", lambda: "built otherwise"),
            (torch, "get_num_threads", lambda: 77),
            (isolation, "processor", lambda: "another"),
            (isolation, "_CODE", isolation._CODE[1:]),
        ]
    ):
        with monkeypatch.context() as patched:
            patched.setattr(of, name, other)
            assert count() == 2 + number
    assert count() == 6


def test_a_finding_that_cannot_be_read_counts_as_none(count: Callable[[], int], tmp_path: Path) -> None:
    assert count() == 1
    [file] = (tmp_path / "kept").iterdir()
    for damaged in (b"", file.read_bytes()[:10], b'{"mode":"padded","shapes":3,"more":1}'):
        file.write_bytes(damaged)
        before = count()
        assert count() == before
        assert list((tmp_path / "kept").iterdir()) == [file]
    assert count() == 4


def test_a_finding_that_cannot_be_kept_is_made_again(count: Callable[[], int], tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("a file, where the folder should be")
    assert [count(), count()] == [1, 2]


def test_a_finding_goes_into_folders_that_are_not_there_yet(tmp_path: Path) -> None:
    for _ in range(2):
        once(tmp_path / "a" / "b", "the weights", lambda: Isolation("padded", 3))
    assert len(os.listdir(tmp_path / "a" / "b")) == 1
