"""A program as the service has played it, done again in plain torch: what clients were told and what was saved has to
be the same to round-off.

How much that is depends on the program: Adam divides by the size of gradients, a router decides between near equals.
So plain torch does everything twice, in float32 and in float64, and what the service says may be `SLACK` times as far
from the one as the other is. Where those two do not agree any more, nothing can be said of that run: an optimizer has
divided rounding by rounding.
"""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file
from torch import Tensor
from weft.wire.binary.train_codec import decode_train_output

from tests.truth import plays
from tests.truth.plain import LOSSES, Computed, Factors, Plain, State, copied
from tests.truth.programs import (
    ALPHA,
    CUSTOM,
    Bad,
    Batch,
    Create,
    Datum,
    Forward,
    ForwardBackward,
    Load,
    Operation,
    Planned,
    Resume,
    SaveState,
    Step,
    TwoPass,
    chunks_of,
    custom_loss,
    data_of,
    kind_of_run,
    two_pass_weights,
)
from tests.truth.search import Bench

#: The name of the checkpoint that holds a run's first weights.
START = 89
SLACK = 20.0
#: Where float32 and float64 differ by more (log-probabilities; else relative), rounding has made a run incomparable.
LOST = 1e-2
#: Always allowed: of log-probabilities; relative, of losses, norms, and the change of a weight tensor.
LOGPROB, RELATIVE, WEIGHTS = 1e-4, 1e-4, 1e-3


def custom(lp: Tensor, datum: Mapping[str, Tensor], config: Mapping[str, float]) -> Tensor:
    loss: Tensor = custom_loss(lp, datum["advantages"], datum["logprobs"])[0]
    return loss


LOSSES[CUSTOM] = custom


def compare_in_plain(bench: Bench, model: Any, program: Sequence[Operation]) -> InPlain:
    """Play a program patiently in the service, then in plain torch with `model`, the same as the service's."""
    with mock.patch.object(plays, "bits_of", tensors_of):
        found = bench.play(with_starts(program))
    done = InPlain(model, found)
    for each in found.steps:
        done.take(each)
    return done


def with_starts(program: Sequence[Operation]) -> tuple[Operation, ...]:
    """The program, with every run's first weights saved."""
    return tuple(
        part for op in program for part in ((op, SaveState(op.run, START)) if isinstance(op, Create) else (op,))
    )


def tensors_of(folder: Path) -> dict[str, Any]:
    return load_file(folder / "adapter.safetensors")


def factors_of(tensors: Mapping[str, Tensor]) -> Factors:
    """The tensors of a checkpoint, by their names in an export."""
    found: Factors = {}

    def pair(module: str, a: Tensor, b: Tensor) -> None:
        found[f"{module}.A"], found[f"{module}.B"] = a, b

    for name, tensor in tensors.items():
        at, _, last = name.rpartition(".")
        module = f"model.{at.replace('attn', 'self_attn')}"
        if last == "qkv_A":
            for part, a in zip("qkv", tensor.chunk(3), strict=True):
                pair(f"{module}.{part}_proj", a, tensors[f"{at}.{part}_B"])
        elif last == "o_A":
            pair(f"{module}.o_proj", tensor, tensors[f"{at}.o_B"])
        elif last == "gate_up_A":
            gate, up = tensor[None].chunk(2, dim=1)
            pair(f"{module}.experts.w1", gate, tensors[f"{at}.gate_B"])
            pair(f"{module}.experts.w3", up, tensors[f"{at}.up_B"])
            pair(f"{module}.experts.w2", tensors[f"{at}.down_A"], tensors[f"{at}.down_B"][None])
        elif name == "unembed_A":
            pair("model.unembed_tokens", tensor, tensors["unembed_B"])
    return found


class Pair:
    """One run, in float32 and in float64."""

    def __init__(self, single: Plain, double: Plain) -> None:
        self.single, self.double = single, double

    def __iter__(self) -> Any:
        return iter((self.single, self.double))

    def resumed(self, name: int, *, optimizer: bool) -> Pair:
        return Pair(*(plain.resumed(plain.saved[str(name)], optimizer=optimizer) for plain in self))

    def load(self, name: int, of: Pair, *, optimizer: bool) -> None:
        for plain, source in zip(self, of, strict=True):
            plain.load_state(source.saved[str(name)], optimizer=optimizer)


@dataclass
class InPlain:
    """Follows a play in the order of its operations. `differences`: where plain torch gives something else."""

    model: Any
    found: plays.Found
    differences: list[str] = field(default_factory=list)
    compared: Counter[str] = field(default_factory=Counter)
    #: Runs whose next step would lack a gradient, and so is not taken.
    lacking: set[int] = field(default_factory=set)
    #: Runs that can no longer be compared.
    lost: set[int] = field(default_factory=set)
    #: The largest share of the allowed difference that was used, by kind.
    used: dict[str, float] = field(default_factory=dict)
    _runs: dict[int, Pair] = field(default_factory=dict)

    def __post_init__(self) -> None:
        single = copy.deepcopy(self.model)
        single.set_experts_implementation("eager")  # only these experts take float64
        self._models = (single, copy.deepcopy(single).double())

    def take(self, each: Planned) -> None:
        match each.op:
            case Create():
                self._create(each, each.op)
            case Resume() if self._ended_well(each):
                self._follow(each.op.run, each.op.source[0])
                self._runs[each.op.run] = self._runs[each.op.source[0]].resumed(
                    each.op.source[1], optimizer=each.op.optimizer
                )
            case Load() if self._ended_well(each):
                source = self._runs[each.op.source[0]]
                self.lacking.discard(each.op.run)
                self._follow(each.op.run, each.op.source[0])
                self._runs[each.op.run].load(each.op.source[1], source, optimizer=each.op.optimizer)
            case SaveState() if self._ended_well(each):
                self._save(each, each.op)
            case Forward() | ForwardBackward():
                data = data_of(each.op.batch)
                for part, (start, stop) in enumerate(chunks_of(each.op.batch.lengths, each.op.chunks)):
                    self._compute(each, part, each.op.batch, data[start:stop], isinstance(each.op, ForwardBackward))
            case TwoPass():
                self._two_pass(each, each.op)
            case Step():
                self._step(each, each.op)
            case Bad():
                if self.found.outcomes[f"{each.place}.0"][0] == "result":
                    self.differences.append(f"{each.place} {each.op} was done")
                if each.op.fault != "optimizer":
                    self.lacking.add(each.op.run)

    def _create(self, each: Planned, op: Create) -> None:
        tensors = self.found.checkpoints[f"session-{each.session}:train:{each.model_seq}/weights/n{START}"]
        factors = factors_of(tensors)  # type: ignore[arg-type]
        single, double = factors, {name: tensor.double() for name, tensor in factors.items()}
        models = zip(self._models, (single, double), strict=True)
        self._runs[op.run] = Pair(*(Plain(model, start, ALPHA / op.rank) for model, start in models))

    def _save(self, each: Planned, op: SaveState) -> None:
        for plain in self._runs[op.run]:
            plain.save_state(str(op.name))
        made = next(e for e in self.found.steps if isinstance(e.op, Create | Resume) and e.op.run == op.run)
        last = [
            e for e in self.found.steps if isinstance(e.op, SaveState) and (e.op.run, e.op.name) == (op.run, op.name)
        ]
        if each is not last[-1] or op.name == START:
            return  # a later save has the name
        tensors = self.found.checkpoints[f"session-{made.session}:train:{made.model_seq}/weights/n{op.name}"]
        single, double = (copied(plain.state).factors for plain in self._runs[op.run])
        start = self._runs[op.run].double.saved.get(str(START), State(double)).factors
        for name, factor in factors_of(tensors).items():  # type: ignore[arg-type]
            exact = double[name].detach()
            size = float(max((exact - start[name].detach()).norm(), 1e-3 * exact.norm(), torch.tensor(1e-9)))
            apart = float((factor - exact).norm()) / size
            self._hold(each, f"weights {name}", apart, float((single[name] - exact).detach().norm()) / size, WEIGHTS)

    def _compute(self, each: Planned, part: int, batch: Batch, data: Sequence[Datum], trains: bool) -> None:
        outcome = self.found.outcomes[f"{each.place}.{part}"]
        if outcome[0] != "result":
            self.differences.append(f"{each.place}.{part} {each.op} ended as {outcome}")
            return
        outputs, metrics = decode_train_output(outcome[1])
        rows = [{"tokens": datum.tokens, **datum.inputs} for datum in data]
        method, config = "forward_backward" if trains else "forward", dict(batch.config)
        single, double = (getattr(plain, method)(rows, batch.loss, config) for plain in self._runs[each.op.run])  # type: ignore[union-attr]
        got = torch.cat([torch.as_tensor(output["logprobs"]).view(-1) for output in outputs])
        rough, exact = (torch.cat([lp.view(-1) for lp in computed.logprobs]) for computed in (single, double))
        self._hold(each, "logprob", float((got - exact).abs().max()), float((rough - exact).abs().max()), LOGPROB)
        self._loss(each, metrics["loss:sum"], single, double)

    def _loss(self, each: Planned, got: float, single: Computed, double: Computed) -> None:
        size = 1.0 + abs(double.loss)
        self._hold(each, "loss", abs(got - double.loss) / size, abs(single.loss - double.loss) / size, RELATIVE)

    def _two_pass(self, each: Planned, op: TwoPass) -> None:
        """The second pass has weights that the client computed from the service's answer to the first."""
        batch = replace(op.batch, loss="cross_entropy", config=(), targets=1)
        data = data_of(batch)
        if not self._ended_well(each):
            self.differences.append(f"{each.place} {op} ended as {self.found.outcomes[f'{each.place}.0']}")
            return
        self._compute(each, 0, batch, data, False)
        outputs, _ = decode_train_output(self.found.outcomes[f"{each.place}.0"][1])
        told = [row["logprobs"] for row in outputs]
        pairs = zip(data, told, strict=True)
        second = [Datum(d.tokens, d.inputs | {"weights": two_pass_weights(d, lp)}) for d, lp in pairs]
        self._compute(each, 1, batch, second, True)

    def _step(self, each: Planned, op: Step) -> None:
        outcome, lacks = self.found.outcomes[f"{each.place}.0"], op.run in self.lacking
        self.lacking.discard(op.run)
        if (outcome[0] == "result") is lacks:
            self.differences.append(
                f"{each.place} {op} ended as {outcome}, and {'lacks' if lacks else 'has'} its gradient"
            )
        if outcome[0] != "result" or lacks:
            return
        params = {name: value for name, value in vars(op).items() if name != "run"}
        if kind_of_run(self.found.steps, op.run).optimizer == "dimuon":
            params["type"] = "dimuon"
        rough, exact = (plain.optim_step(params) for plain in self._runs[op.run])
        got = json.loads(outcome[1])["metrics"]["grad_norm:mean"]
        size = max(exact, 1e-3)
        self._hold(each, "norm", abs(got - exact) / size, abs(rough - exact) / size, RELATIVE)

    def _follow(self, run: int, source: int) -> None:
        if source in self.lost:
            self.lost.add(run)

    def _ended_well(self, each: Planned) -> bool:
        return bool(self.found.outcomes[f"{each.place}.0"][0] == "result")

    def _hold(self, each: Planned, what: str, apart: float, rounding: float, least: float) -> None:
        run = each.op.run  # type: ignore[union-attr]
        if run in self.lost or not rounding < LOST:
            self.lost.add(run)
            return
        allowed = least + SLACK * rounding
        kind = what.partition(" ")[0]
        self.compared[kind] += 1
        self.used[kind] = max(self.used.get(kind, 0.0), apart / allowed)
        if not apart <= allowed:
            self.differences.append(f"{each.place} {each.op}: {what} is off by {apart:.2g}, {allowed:.2g} is allowed")
