"""What every engine promises (workers.generator.engine). A second engine joins by a parameter in conftest.py."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from workers.generator.engine import Engine, Finished, GenerateRequest, SamplingParams

from .conftest import EOS, VOCAB, run, until_read

MakeEngine = Callable[..., Engine]
NO_STOP = SamplingParams(max_tokens=12, stop_at_eos=False)
GREEDY = replace(NO_STOP, temperature=0)


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(int(token) for token in np.random.default_rng(seed).integers(12, VOCAB, length))


def ask(id: str, length: int = 5, sampling: SamplingParams = NO_STOP, **fields: object) -> GenerateRequest:
    return GenerateRequest(id, prompt(length, seed=length), sampling, **fields)  # type: ignore[arg-type]


def same(a: Finished, b: Finished) -> bool:
    """Equal bit for bit."""
    pairs = zip(a.sequences, b.sequences, strict=True)
    return all(
        np.array_equal(x.tokens, y.tokens) and np.array_equal(x.logprobs, y.logprobs) and x.stop_reason == y.stop_reason
        for x, y in pairs
    )


def greedy_tokens(engine: Engine, request: GenerateRequest) -> list[int]:
    return run(engine, replace(request, sampling=GREEDY))[request.id].sequences[0].tokens.tolist()


# -- company


def test_a_seeded_request_is_the_same_alone_and_in_a_crowd(make_engine: MakeEngine, adapters: dict[str, Path]) -> None:
    crowd = []
    for i in range(14):
        name = f"a{i % 5}" if i % 5 < 4 else ""
        sampling = SamplingParams(max_tokens=4 + i, temperature=0.5 + 0.1 * i, seed=i, top_k=(i % 3) * 20 or -1)
        crowd.append(ask(f"r{i}", 2 + 10 * (i // 2), sampling, num_samples=1 + i % 3, adapter=name,
                         adapter_folder=adapters.get(name)))  # fmt: skip
    together = run(make_engine(slots=9), *crowd)
    for request in crowd:
        assert same(together[request.id], run(make_engine(slots=9), request)[request.id]), request.id


def test_requests_join_and_leave_between_steps(make_engine: MakeEngine) -> None:
    engine = make_engine(slots=3)
    requests = [ask(f"r{i}", 3 + i, SamplingParams(max_tokens=3 + 4 * i, seed=i)) for i in range(6)]
    expected = {r.id: run(make_engine(slots=3), r)[r.id] for r in requests}
    finished: dict[str, Finished] = {}
    for request in requests:
        engine.add(request)
        for result in [*engine.step(), *engine.step()]:
            finished[result.id] = result
    finished |= run(engine)
    assert all(same(finished[id], result) for id, result in expected.items())


def test_more_sequences_than_slots_wait_and_start_later(make_engine: MakeEngine) -> None:
    request = ask("r", 6, SamplingParams(max_tokens=9, seed=1, stop_at_eos=False), num_samples=11)
    wide = run(make_engine(slots=16), request)["r"]
    narrow = run(make_engine(slots=2), request)["r"]
    assert same(wide, narrow)
    assert narrow.facts == wide.facts
    assert (wide.facts.prefill, wide.facts.cached_prefill, wide.facts.sample) == (6, 60, 99)


def test_many_one_token_samples_through_one_slot(make_engine: MakeEngine) -> None:
    request = ask("r", 4, SamplingParams(max_tokens=1, seed=0), num_samples=600)
    assert len(run(make_engine(slots=1), request)["r"].sequences) == 600


def test_free_slots_count_what_waits(make_engine: MakeEngine) -> None:
    engine = make_engine(slots=4)
    assert engine.free_slots == 4
    engine.add(ask("a", num_samples=3))
    assert engine.free_slots == 1
    engine.step()
    assert engine.free_slots == 1
    engine.add(ask("b", num_samples=3))
    assert engine.free_slots == 0
    run(engine)
    assert engine.free_slots == 4
    assert not engine.busy


def test_a_tenant_without_slots_does_not_wait_for_one_that_holds_all(make_engine: MakeEngine) -> None:
    engine = make_engine(slots=4)
    long = SamplingParams(max_tokens=80, seed=1, stop_at_eos=False)
    engine.add(ask("flood", 6, long, num_samples=4, tenant="a"))
    engine.step()
    assert engine.free_slots == 0
    assert engine.yields > 0
    engine.add(ask("new", 6, replace(long, max_tokens=2), tenant="b"))
    ended = list[str]()
    while engine.busy:
        ended += [finished.id for finished in engine.step()]
    assert ended == ["new", "flood"]


def test_a_long_queue_of_prompts_does_not_stop_decoding(make_engine: MakeEngine) -> None:
    engine = make_engine(slots=8, prefill_tokens=20)
    engine.add(ask("first", 3, SamplingParams(max_tokens=90, stop_at_eos=False)))
    engine.step()
    for i in range(6):
        engine.add(ask(f"r{i}", 18))
    before = engine.stats()
    engine.step()
    after = engine.stats()
    assert after.prefill_tokens - before.prefill_tokens == 18
    assert after.slots_busy - before.slots_busy == 2


# -- randomness


def test_a_resumed_sample_goes_on_as_the_first_would_have(make_engine: MakeEngine) -> None:
    sampling = SamplingParams(max_tokens=40, seed=7, stop_at_eos=False)
    whole = ask("whole", 9, sampling, num_samples=2)
    expected = [sequence.tokens.tolist() for sequence in run(make_engine(), whole)["whole"].sequences]
    assert expected[0] != expected[1]
    for cut in (1, 2, 3, 4, 5, 19):
        behind = whole.prompt + tuple(expected[0][:cut])
        resumed = replace(whole, id="resumed", prompt=behind, sampling=replace(sampling, max_tokens=40 - cut))
        assert run(make_engine(), resumed)["resumed"].sequences[0].tokens.tolist() == expected[0][cut:], cut


def test_no_tokens_but_the_prompts_logprobs(make_engine: MakeEngine) -> None:
    engine = make_engine(context=24)
    one = ask("one", 23, SamplingParams(max_tokens=1, seed=0), prompt_logprobs=True)
    none = ask("none", 23, SamplingParams(max_tokens=0), prompt_logprobs=True, num_samples=2)
    full = ask("full", 24, SamplingParams(max_tokens=0))
    found = run(engine, one, none, full)
    assert np.array_equal(found["none"].prompt_logprobs[1:], found["one"].prompt_logprobs[1:])  # type: ignore[index]
    for name, count in (("none", 2), ("full", 1)):
        assert [(s.tokens.size, s.stop_reason) for s in found[name].sequences] == [(0, "length")] * count
        assert found[name].facts.sample == 0
    assert found["none"].facts.prefill + found["none"].facts.cached_prefill == 23
    assert not engine.busy
    assert engine.free_slots == 8


def test_equal_seeds_give_equal_samples(make_engine: MakeEngine) -> None:
    sampling = SamplingParams(max_tokens=20, seed=5, stop_at_eos=False)
    first = run(make_engine(), ask("r", sampling=sampling, num_samples=3))["r"]
    assert same(first, run(make_engine(), ask("r", sampling=sampling, num_samples=3))["r"])
    texts = {tuple(sequence.tokens) for sequence in first.sequences}
    assert len(texts) == 3
    assert np.array_equal(
        run(make_engine(), ask("r", sampling=sampling))["r"].sequences[0].tokens, first.sequences[0].tokens
    )
    other = run(make_engine(), ask("r", sampling=replace(sampling, seed=6)))["r"]
    assert not np.array_equal(other.sequences[0].tokens, first.sequences[0].tokens)


def test_without_a_seed_samples_differ(make_engine: MakeEngine) -> None:
    engine = make_engine()
    runs = [run(engine, ask("r", sampling=replace(NO_STOP, max_tokens=30)))["r"] for _ in range(2)]
    assert not same(runs[0], runs[1])


@pytest.mark.parametrize("cut", [{"top_k": 1}, {"top_p": 1e-6}])
def test_the_narrowest_cut_is_greedy(make_engine: MakeEngine, cut: dict[str, float]) -> None:
    engine = make_engine()
    drawn = run(engine, ask("r", sampling=replace(NO_STOP, **cut)))["r"].sequences[0].tokens.tolist()  # type: ignore[arg-type]
    assert drawn == greedy_tokens(engine, ask("r"))


# -- the end of a sequence


def test_eos_ends_and_is_kept_unless_turned_off(make_engine: MakeEngine) -> None:
    long = SamplingParams(max_tokens=80, seed=2, temperature=3.0)
    stopped = run(make_engine(), ask("r", sampling=long, num_samples=20))["r"].sequences
    free = run(make_engine(), ask("r", sampling=replace(long, stop_at_eos=False), num_samples=20))["r"].sequences
    assert any(sequence.stop_reason == "stop" for sequence in stopped)
    for short, full in zip(stopped, free, strict=True):
        assert (len(full.tokens), full.stop_reason) == (80, "length")
        eos = [i for i, token in enumerate(full.tokens) if token in EOS]
        cut = eos[0] + 1 if eos else 80
        assert short.tokens.tolist() == full.tokens.tolist()[:cut]
        assert short.stop_reason == ("stop" if eos else "length")
        assert len(short.logprobs) == len(short.tokens)


def test_stop_token_is_kept(make_engine: MakeEngine) -> None:
    engine = make_engine()
    tokens = greedy_tokens(engine, ask("r"))
    stop = tokens[4]
    result = run(engine, ask("r", sampling=replace(GREEDY, stop_token_ids=(stop,))))["r"].sequences[0]
    assert result.tokens.tolist() == tokens[: tokens.index(stop) + 1]
    assert result.stop_reason == "stop"


def test_stop_string_over_two_tokens(make_engine: MakeEngine) -> None:
    engine = make_engine()
    tokens = greedy_tokens(engine, ask("r"))
    text = f"{tokens[3]}><{tokens[4]}"
    end = next(n for n in range(2, 6) if tokens[n - 2 : n] == tokens[3:5])
    result = run(engine, ask("r", sampling=replace(GREEDY, stop_strings=("never", text))))["r"].sequences[0]
    assert result.tokens.tolist() == tokens[:end]
    assert result.stop_reason == "stop"


def test_without_max_tokens_a_sequence_fills_the_context(make_engine: MakeEngine) -> None:
    result = run(make_engine(context=40), ask("r", 30, SamplingParams(stop_at_eos=False)))["r"].sequences[0]
    # The last token needs no place in the context: it is never fed back.
    assert (len(result.tokens), result.stop_reason) == (11, "length")


# -- refusals and faults


def test_a_prompt_that_does_not_fit_names_limit_and_length(make_engine: MakeEngine) -> None:
    engine = make_engine(context=40)
    finished = run(engine, ask("long", 41), ask("fits", 40))
    error = finished["long"].error
    assert error is not None
    assert error.category == "user"
    assert "41" in error.message
    assert "40" in error.message
    assert len(finished["fits"].sequences[0].tokens) == 1


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"prompt": ()}, "empty"),
        ({"prompt": (VOCAB,)}, "vocabulary"),
        ({"num_samples": 0}, "num_samples"),
        ({"sampling": SamplingParams(max_tokens=-1)}, "max_tokens"),
        ({"sampling": SamplingParams(temperature=-1.0)}, "temperature"),
        ({"sampling": SamplingParams(temperature=math.nan)}, "temperature"),
        ({"sampling": SamplingParams(top_p=0.0)}, "top_p"),
        ({"sampling": SamplingParams(top_k=-2)}, "top_k"),
        ({"adapter": "gone", "adapter_folder": Path("nowhere")}, "gone"),
    ],
)
def test_a_bad_request_fails_alone(make_engine: MakeEngine, fields: dict[str, object], word: str) -> None:
    good = ask("good", sampling=replace(NO_STOP, seed=0))
    finished = run(make_engine(), good, replace(ask("bad"), **fields))  # type: ignore[arg-type]
    error = finished["bad"].error
    assert error is not None
    assert error.category == "user"
    assert word in error.message
    assert same(finished["good"], run(make_engine(), good)["good"])


# -- cancel and swap


def test_cancel_gives_the_tokens_so_far(make_engine: MakeEngine) -> None:
    request = ask("r", sampling=SamplingParams(max_tokens=50, seed=3, stop_at_eos=False), num_samples=3)
    whole = run(make_engine(slots=2), request)["r"]
    engine = make_engine(slots=2)
    engine.add(request)
    for _ in range(5):
        engine.step()
    partial = engine.cancel("r")
    assert partial is not None
    lengths = [len(sequence.tokens) for sequence in partial.sequences]
    assert 4 <= lengths[0] <= 7
    assert lengths[2] == 0
    assert partial.facts.sample == sum(lengths)
    for sequence, full in zip(partial.sequences, whole.sequences, strict=True):
        assert sequence.tokens.tolist() == full.tokens.tolist()[: len(sequence.tokens)]
        assert sequence.stop_reason == "length"
    assert engine.free_slots == 2
    assert not engine.busy


def test_cancel_before_the_start_and_of_nothing(make_engine: MakeEngine) -> None:
    engine = make_engine(slots=1)
    engine.add(ask("a", num_samples=60))  # they take long enough
    assert engine.step() == []
    engine.add(ask("b", num_samples=2))
    waiting = engine.cancel("b")
    assert waiting is not None
    assert [len(sequence.tokens) for sequence in waiting.sequences] == [0, 0]
    assert waiting.facts.prefill == waiting.facts.cached_prefill == waiting.facts.sample == 0
    assert engine.cancel("b") is None
    assert set(run(engine)) == {"a"}


def test_swap_takes_effect_while_others_keep_generating(make_engine: MakeEngine, adapters: dict[str, Path]) -> None:
    swapped = ask("swapped", sampling=GREEDY, adapter="policy", adapter_folder=adapters["a0"])
    other = ask("other", 9, GREEDY, adapter="a2", adapter_folder=adapters["a2"])
    before = run(make_engine(), swapped)["swapped"].sequences[0].tokens.tolist()
    engine = make_engine()
    for request in (swapped, other):
        engine.add(request)
    until_read(engine)
    for _ in range(4):
        engine.step()
    engine.swap_adapter("policy", adapters["a1"])
    until_read(engine)
    finished = run(engine)
    after = finished["swapped"].sequences[0].tokens.tolist()
    assert after[:4] == before[:4]
    assert after != before
    assert same(finished["other"], run(make_engine(), other)["other"])
    renamed = replace(swapped, adapter="fresh", adapter_folder=adapters["a1"])
    assert greedy_tokens(engine, swapped) == greedy_tokens(make_engine(), renamed)


def test_a_swap_that_cannot_be_read_fails_only_what_needs_it(
    make_engine: MakeEngine, adapters: dict[str, Path], tmp_path: Path
) -> None:
    running = ask("running", sampling=replace(NO_STOP, max_tokens=60, seed=4), adapter="policy",
                  adapter_folder=adapters["a0"])  # fmt: skip
    alone = run(make_engine(), running)["running"]
    engine = make_engine()
    engine.add(running)
    engine.step()
    engine.swap_adapter("policy", tmp_path)
    engine.add(replace(running, id="needs", adapter_folder=tmp_path))
    finished = run(engine)
    assert same(finished["running"], alone)
    late = run(engine, replace(running, id="late", adapter_folder=tmp_path))["late"]
    for failed in (finished["needs"], late):
        assert failed.error is not None
        assert failed.error.category == "user"
        assert "the sampler weights 'policy' are damaged" in failed.error.message
    engine.swap_adapter("policy", adapters["a1"])
    renamed = replace(running, id="renamed", adapter="fresh", adapter_folder=adapters["a1"])
    again = run(engine, running, renamed)
    assert same(again["running"], again["renamed"])


# -- prompt logprobs


def test_prompt_logprobs_come_when_asked(make_engine: MakeEngine) -> None:
    plain = ask("plain", sampling=replace(NO_STOP, max_tokens=1))
    finished = run(
        make_engine(),
        plain,
        replace(plain, id="logprobs", prompt_logprobs=True),
        replace(plain, id="both", prompt_logprobs=True, topk_prompt_logprobs=VOCAB),
    )
    assert finished["plain"].prompt_logprobs is None
    assert finished["plain"].topk_prompt_logprobs is None
    logprobs, table = finished["both"].prompt_logprobs, finished["both"].topk_prompt_logprobs
    assert finished["logprobs"].topk_prompt_logprobs is None
    assert logprobs is not None
    assert table is not None
    assert np.array_equal(logprobs, finished["logprobs"].prompt_logprobs, equal_nan=True)  # type: ignore[arg-type]
    assert len(logprobs) == 5
    assert math.isnan(logprobs[0])
    rows = table.tolist()
    assert rows[0] is None
    for position in range(1, 5):
        row = rows[position]
        assert row is not None
        assert dict(row)[plain.prompt[position]] == logprobs[position]
        assert math.fsum(math.exp(logprob) for _, logprob in row) == pytest.approx(1, abs=1e-5)
        assert [logprob for _, logprob in row] == sorted((logprob for _, logprob in row), reverse=True)


def test_prompt_of_one_token_has_nothing_to_tell(make_engine: MakeEngine) -> None:
    result = run(make_engine(), ask("r", 1, prompt_logprobs=True, topk_prompt_logprobs=2))["r"]
    assert result.prompt_logprobs is not None
    assert result.topk_prompt_logprobs is not None
    assert np.isnan(result.prompt_logprobs).all()
    assert result.topk_prompt_logprobs.tolist() == [None]
