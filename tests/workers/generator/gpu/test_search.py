"""A random search over what an engine on a device is asked and what happens to it: arrivals, cancellations, new
weights, few pages, cached prompts, prompt lookup, and failures wherever something is sent to the device or received
from it.

Whatever ends has the tokens, log-probabilities and routes that each of its sequences has alone, drawn one step after
the other; no page is held twice or lost; and a failure ends nobody but who was being computed alone when it came.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from weft.wire.binary.sample_codec import PolicySpan, SequenceResult

from tests.search import chance, examples
from tests.workers.generator.conftest import EOS, VOCAB, four_adapters, spell, until_read
from tests.workers.generator.gpu.device import Device, Faults, assert_pages, failing
from tests.workers.generator.test_lookup import repeating
from tests.workers.model import models
from workers.generator.cache.kv_cache import PAGE_TOKENS
from workers.generator.engine import Finished, GenerateRequest, SamplingParams
from workers.generator.requests.progress import SequenceProgress
from workers.generator.tokens.sampling import sequence_rng
from workers.generator.torch_engine import TorchEngine
from workers.model.adapters.adapter import Adapter, save_adapter
from workers.model.adapters.shape import AdapterShape
from workers.model.decoder import Decoder

CONTEXT = 96
VERSIONS = range(1, 7)


@dataclass
class World:
    """A model with its adapters, the versions of a policy, and what each sequence gets when it is alone."""

    decoder: Decoder
    adapters: dict[str, Path]
    versions: dict[int, Path]
    _alone: TorchEngine = field(init=False)
    _known: dict[object, tuple[SequenceResult, ...]] = field(default_factory=dict)
    _names: Iterator[int] = field(default_factory=lambda: iter(range(1 << 30)))

    def __post_init__(self) -> None:
        self._alone = TorchEngine(
            self.decoder, EOS, slots=4, context=CONTEXT, decode_text=spell, prefix_bytes=0, adapter_bytes=0
        )

    def alone(self, request: GenerateRequest, sample: int, policy: tuple[PolicySpan, ...]) -> SequenceResult:
        """The results of a sequence alone; if it follows a run, with the weights that drew each token."""
        if not request.run:
            plain = replace(request, id="alone", priority=0, tenant="")
            if plain not in self._known:
                self._alone.add(plain)
                self._known[plain] = self._ended().sequences
            return self._known[plain][sample]
        return self._followed(request, sample, policy)

    def _followed(self, request: GenerateRequest, sample: int, policy: tuple[PolicySpan, ...]) -> SequenceResult:
        name, engine = f"policy {next(self._names)}", self._alone
        first = self.versions[policy[0].version]
        asked = replace(request, id="alone", adapter=name, adapter_folder=first, num_samples=1, max_staleness=None)
        engine.add(asked)
        (sequence,) = engine._open.here["alone"].sequences
        sequence._rng = sequence_rng(request.sampling.seed, sample, len(request.prompt))
        with pytest.MonkeyPatch.context() as patch:  # the first token alone: weights may change after it
            patch.setattr(engine, "_decode", lambda batch: None)
            self._until(sequence, 1)
        drawn = 0
        for span, after in pairwise(policy):
            drawn += span.length
            self._until(sequence, drawn)
            engine.swap_adapter(name, self.versions[after.version])
        return self._ended().sequences[0]

    def _until(self, sequence: SequenceProgress, drawn: int) -> None:
        while len(sequence.tokens) < drawn and sequence.stop_reason is None:
            until_read(self._alone)
            self._alone._open.finished += self._alone.step()

    def _ended(self) -> Finished:
        while True:
            until_read(self._alone)
            for finished in self._alone.step():
                assert finished.error is None
                return finished


@pytest.fixture(scope="module")
def mixture(decoder: Decoder, adapters: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(decoder, adapters, policies(decoder, tmp_path_factory))


@pytest.fixture(scope="module")
def windows(tmp_path_factory: pytest.TempPathFactory) -> World:
    """Layers with windows have pages of their own, which are given back."""
    model = models.reference("gpt-oss", vocab_size=VOCAB, max_position_embeddings=CONTEXT, sliding_window=PAGE_TOKENS)
    decoder = models.ours(model, tmp_path_factory.mktemp("windows"))
    return World(decoder, four_adapters(decoder, tmp_path_factory), policies(decoder, tmp_path_factory))


def policies(decoder: Decoder, folders: pytest.TempPathFactory) -> dict[int, Path]:
    found = {}
    for version in VERSIONS:
        adapter = Adapter.init(AdapterShape(decoder.config, 4), seed=0, scale=2.0)
        noise = torch.randn(adapter.flat.shape, generator=torch.Generator().manual_seed(version))
        adapter.flat.add_(noise, alpha=0.05)
        found[version] = folders.mktemp("policy") / str(version)
        save_adapter(adapter, found[version], base_model="tiny", details={"step": version})
    return found


class Program:
    """Random requests to one engine, and their results."""

    def __init__(self, world: World, draw: Random) -> None:
        self.world, self.draw = world, draw
        self.faults = Faults(draw, draw.choice([0, 0.01, 0.05]))
        self.slots, captures = draw.randint(1, 6), draw.random() < 0.5
        lookup = draw.choice([0, 0, 0, 4])
        self.engine = TorchEngine(
            world.decoder,
            EOS,
            slots=self.slots,
            context=CONTEXT,
            kv_tokens=draw.choice([96, 128, 192, None]),
            prefill_tokens=draw.choice([PAGE_TOKENS, 64, 2048]),
            prefix_bytes=draw.choice([0, 100_000, 1 << 24]),
            adapter_bytes=draw.choice([0, 1 << 24]),
            lookup=lookup,
            decode_text=spell,
        )
        self.device = Device(self.engine, self.faults, slots=self.slots, context=CONTEXT, captures=captures)
        self.open: dict[str, GenerateRequest] = {}
        #: Runs whose newest weights could not be read at some time.
        self.lost: set[str] = set()
        self.newest = dict.fromkeys(("m", "n"), VERSIONS[0])
        self.ended: list[tuple[GenerateRequest, Finished, bool]] = []
        self.drawn = 0

    def run(self, count: int) -> None:
        doing = [self.step] * 10 + [self.add] * 4 + [self.cancel, self.swap, self.deliver, self.deliver]
        with failing(self.faults):
            for _ in range(count):
                self.draw.choice(doing)()
                self.look()
            self.faults.chance = 0
            for _ in range(3000):
                if not self.engine.busy:
                    break
                self.deliver()
                self.step()
                self.look()
        assert not self.open, f"still open: {[*self.open]}, {self.engine.stats()}"

    def step(self) -> None:
        for finished in self.engine.step():
            request = self.open.pop(finished.id)
            if finished.error is not None:
                self.check_error(request, finished.error.message)
            self.ended.append((request, finished, False))

    def deliver(self) -> None:
        self.device.reader.deliver()

    def cancel(self) -> None:
        name = self.draw.choice([*self.open, "nobody"])
        finished = self.engine.cancel(name)
        if finished is not None:
            request = self.open.pop(name)
            if finished.error is not None:
                self.check_error(request, finished.error.message)
            self.ended.append((request, finished, True))

    def swap(self) -> None:
        run = self.draw.choice([*self.newest])
        version = self.newest[run] = min(VERSIONS[-1], self.newest[run] + self.draw.randint(0, 2))
        folder = self.world.versions[version]
        if self.draw.random() < 0.1:
            self.lost.add(run)
            folder = Path("/nowhere")
        self.engine.swap_adapter(f"inflight:{run}", folder)
        self.engine.run_moved(run, version)

    def add(self) -> None:
        request = self.request()
        name = self.draw.choice([f"r{len(self.ended)}-{len(self.open)}", "again"])
        if len(self.open) >= 8 or name in self.open:
            return
        request = replace(request, id=name)
        if self.draw.random() < 0.05:
            self.device.spoilt[name] = len(request.prompt) + self.draw.randint(0, 20)
        else:
            self.device.spoilt.pop(name, None)
        self.faults.blamed.discard(name)
        self.open[name] = request
        self.engine.add(request)

    def request(self) -> GenerateRequest:
        draw = self.draw
        family = repeating(draw.randint(0, 2), 80)
        prompt = family[: draw.choice([1, 20, 31, 32, 33, 58, 60, 63, 64, 65, draw.randint(1, 80)])]
        sampling = SamplingParams(
            max_tokens=draw.choice([1, 2, 3, 8, 20, 34]),
            temperature=draw.choice([0, 0.3, 1.0, 1.0]),
            top_k=draw.choice([-1, -1, 5]),
            seed=draw.randint(0, 3),
            stop_at_eos=draw.random() < 0.5,
            stop_token_ids=tuple(draw.sample(range(12, VOCAB), draw.choice([0, 3, 20]))),
            stop_strings=tuple(f"<{draw.randint(12, VOCAB)}>" for _ in range(draw.choice([0, 0, 2]))),
        )
        adapter = draw.choice(["", "", *self.world.adapters])
        request = GenerateRequest(
            "",
            prompt,
            sampling,
            num_samples=draw.choice([1, 1, 2, 4]),
            tenant=draw.choice(["", "x", "y"]),
            adapter=adapter,
            adapter_folder=self.world.adapters.get(adapter),
            priority=draw.randint(0, 2),
            topk_sample_logprobs=draw.choice([0, 0, 3]),
            return_routed_experts=draw.random() < 0.2,
        )
        if draw.random() < 0.7:
            return request
        run = draw.choice([*self.newest])
        # Its prompt in one piece: of a longer one, pieces may be of several versions.
        return replace(
            request,
            prompt=prompt[-PAGE_TOKENS:],
            run=run,
            adapter=f"inflight:{run}",
            adapter_folder=self.world.versions[self.newest[run]],
            max_staleness=draw.choice([None, 1, 2]),
        )

    # -- what must hold

    def look(self) -> None:
        assert_pages(self.engine)
        assert not self.device.wrong

    def check(self) -> None:
        for request, finished, cancelled in self.ended:
            self.check_one(request, finished, cancelled)
        stats = self.engine.stats()
        assert stats.kv_tokens_used == stats.running == stats.waiting == 0
        assert not any(held.users for held in self.engine._adapters._here.values())

    def check_error(self, request: GenerateRequest, told: str) -> None:
        """The error was caused by this very request."""
        known = {
            "not finite": request.id in self.device.spoilt,
            "are gone": request.run in self.lost,
            "(Failed)": request.id in self.faults.blamed,
        }
        assert any(said in told and allowed for said, allowed in known.items()), told

    def check_one(self, request: GenerateRequest, finished: Finished, cancelled: bool) -> None:
        if finished.error is not None:
            return
        prompt = len(request.prompt)
        for number, found in enumerate(finished.sequences):
            if not len(found.tokens):
                assert cancelled or found.stale
                continue
            wanted = self.world.alone(request, number, found.policy)
            cut = cancelled or found.stale
            assert_same(found, wanted, prompt, cut)
        facts = finished.facts
        assert facts.sample == sum(len(each.tokens) for each in finished.sequences)
        if not cancelled and not any(each.stale for each in finished.sequences):
            assert facts.prefill + facts.cached_prefill == prompt * request.num_samples


def assert_same(found: SequenceResult, wanted: SequenceResult, prompt: int, cut: bool) -> None:
    """Equal bit for bit; a result that was cut, as far as it goes."""
    count = len(found.tokens)
    assert found.tokens.tolist() == wanted.tokens[:count].tolist()
    np.testing.assert_array_equal(found.logprobs, np.array(wanted.logprobs)[:count])
    if not cut:
        assert (count, found.stop_reason) == (len(wanted.tokens), wanted.stop_reason)
    assert (found.topk is None) == (wanted.topk is None)
    if found.topk is not None and wanted.topk is not None:
        assert found.topk.token_ids.tolist() == wanted.topk.token_ids[:count].tolist()
        assert found.topk.logprobs.tolist() == wanted.topk.logprobs[:count].tolist()
    assert (found.routed_experts is None) == (wanted.routed_experts is None)
    if found.routed_experts is not None and wanted.routed_experts is not None:
        np.testing.assert_array_equal(found.routed_experts, wanted.routed_experts[: prompt + count - 1])


def search(world: World, seed: int, count: int) -> None:
    draw, ahead, failed = chance(seed), 0, 0
    for _ in range(examples(count)):
        seed = draw.getrandbits(64)
        print(f"program {seed}")
        program = Program(world, Random(seed))
        program.run(150)
        program.check()
        program.engine.close()
        ahead += program.device.ahead
        failed += program.faults.failed.total()
    assert ahead > 20 * count
    assert failed > count


@pytest.mark.search
def test_random_programs(mixture: World) -> None:
    search(mixture, 1, 5)


@pytest.mark.search
def test_random_programs_with_windows(windows: World) -> None:
    search(windows, 2, 3)
