"""Sampling from a run's weights, from a path and from the base model; with every option of a sample."""

from __future__ import annotations

import math
import pickle
from typing import Any

import numpy as np
from smoke.data import GREEDY, prompt
from smoke.record import Tour, done
from tinker import types


def sample(tour: Tour, service: Any, run: Any, model: str, path: str | None) -> None:
    """Sample from `run`, from the saved sampler weights at `path`, and from the base model."""
    sampler = tour.call(
        "TrainingClient.save_weights_and_get_sampling_client", lambda: done(run.save_weights_and_get_sampling_client())
    )
    tour.call("SamplingClient.sample", lambda: _two_alike(sampler))
    tour.call("SamplingClient.sample: drawn, with a seed", lambda: _drawn(sampler))
    tour.call("SamplingClient.sample: stop tokens", lambda: _stops(sampler))
    tour.call("SamplingClient.sample: many at once", lambda: _many(sampler))
    tour.call("SamplingClient.compute_logprobs", lambda: _scored(sampler))
    tour.call("SamplingClient.get_base_model", lambda: _equal(sampler.get_base_model(), model))
    tour.call("SamplingClient.get_tokenizer", lambda: sampler.get_tokenizer().encode("3 + 5"))
    tour.call("SamplingClient.sample: prompt logprobs", lambda: _prompt_logprobs(sampler))
    tour.call("SamplingClient.sample: top-k prompt logprobs", lambda: _topk_prompt(sampler), ["topk_prompt_logprobs"])
    tour.call("SamplingClient.sample: top-k sample logprobs", lambda: _topk_sample(sampler), ["topk_sample_logprobs"])
    tour.call("SamplingClient.sample: target prompt logprobs", lambda: _targets(sampler), ["target_prompt_logprobs"])
    tour.call(
        "SamplingClient.sample: alternative prompt tokens", lambda: _alternatives(sampler), ["prompt_alt_tokens_k"]
    )
    tour.call(
        "SamplingClient.compute_logprobs: of the last n",
        lambda: _last(done(sampler.compute_logprobs(prompt(), prompt_logprobs_last_n=3))),
        ["prompt_logprobs_last_n"],
    )
    tour.call("SamplingClient.sample: by a pickled client", lambda: _two_alike(pickle.loads(pickle.dumps(sampler))))  # noqa: S301
    handle = tour.call("SamplingClient.get_sampler_handle", lambda: sampler.get_sampler_handle())
    tour.call("SamplingClient.from_sampler_handle", lambda: _two_alike(type(sampler).from_sampler_handle(handle)))
    tour.call(
        "TrainingClient.save_weights_and_get_sampling_client: inflight",
        lambda: _two_alike(done(run.save_weights_and_get_sampling_client(kind="inflight"))),
        ["kind"],
    )
    by_path = "ServiceClient.create_sampling_client: by path"
    tour.call(by_path, lambda: _two_alike(done(service.create_sampling_client(model_path=path))))
    tour.call("TrainingClient.create_sampling_client", lambda: _two_alike(done(run.create_sampling_client(path))))
    base = "ServiceClient.create_sampling_client: base model"
    tour.call(base, lambda: _two_alike(done(service.create_sampling_client(base_model=model))))
    tour.call(
        "ServiceClient.create_sampling_client: record_stability_info",
        lambda: _two_alike(done(service.create_sampling_client(base_model=model, record_stability_info=True))),
        ["record_stability_info"],
    )


def stable(tour: Tour, service: Any, run: Any, model: str) -> None:
    """The loss that uses what the server recorded while it sampled."""
    name = "TrainingClient.forward_backward: stable_reinforce"
    if not hasattr(types.Datum, "with_provenance"):
        tour.record(name, "absent")
        return
    tour.call(name, lambda: _reinforce(done(service.create_sampling_client(base_model=model, **RECORDED)), run))


RECORDED = {"record_stability_info": True}


def _reinforce(sampler: Any, run: Any) -> None:
    given = prompt()
    (sequence,) = done(sampler.sample(given, 1, GREEDY)).sequences
    tokens, skipped = [int(t) for t in sequence.tokens], given.length - 1
    plain = types.Datum(
        model_input=given.append(types.EncodedTextChunk(tokens=tokens[:-1])),
        loss_fn_inputs={
            "target_tokens": [0] * skipped + tokens,
            "logprobs": [0.0] * skipped + [float(x) for x in sequence.logprobs],
            "advantages": [0.0] * skipped + [1.0] * len(tokens),
        },
    )
    name = sequence.sequence_id
    sampled, asked = types.SampledProvenanceSpan, types.PromptProvenanceSpan
    datum = plain.with_provenance(
        model_input=[
            asked(sequence_id=name, length=given.length),
            sampled(sequence_id=name, length=len(tokens) - 1),
        ],
        loss_fn_inputs=[
            asked(sequence_id=name, offset=1, length=skipped),
            sampled(sequence_id=name, length=len(tokens)),
        ],
    )
    result = done(run.forward_backward([datum], "stable_reinforce"))
    assert np.isfinite(result.metrics["loss:sum"])


def _equal(found: Any, expected: Any) -> None:
    assert found == expected, (found, expected)


def _two_alike(sampler: Any) -> None:
    sequences = done(sampler.sample(prompt(), 2, GREEDY)).sequences
    assert [len(s.tokens) for s in sequences] == [5, 5]
    assert list(sequences[0].tokens) == list(sequences[1].tokens)
    assert all(s.stop_reason == "length" for s in sequences)
    assert all(x <= 0 for s in sequences for x in s.logprobs)


def _drawn(sampler: Any) -> None:
    params = types.SamplingParams(max_tokens=6, seed=11, temperature=0.8, top_k=20, top_p=0.9, stop=[])
    first, second = (done(sampler.sample(prompt(), 1, params)).sequences[0].tokens for _ in range(2))
    assert list(first) == list(second)


def _stops(sampler: Any) -> None:
    greedy = list(done(sampler.sample(prompt(), 1, GREEDY)).sequences[0].tokens)
    params = types.SamplingParams(max_tokens=5, temperature=0.0, stop=[int(greedy[1])])
    stopped = done(sampler.sample(prompt(), 1, params)).sequences[0]
    assert stopped.stop_reason == "stop"
    assert list(stopped.tokens) == greedy[: greedy.index(greedy[1]) + 1]


def _many(sampler: Any) -> None:
    for future in [sampler.sample(prompt(i), 2, GREEDY) for i in range(20)]:
        assert len(done(future).sequences) == 2


def _scored(sampler: Any) -> list[Any]:
    found = done(sampler.compute_logprobs(prompt()))
    assert len(found) == 8
    assert found[0] is None
    assert all(x < 0 for x in found[1:])
    return list(found)


def _prompt_logprobs(sampler: Any) -> None:
    reply = done(sampler.sample(prompt(), 1, GREEDY, include_prompt_logprobs=True))
    assert np.allclose(reply.prompt_logprobs[1:], _scored(sampler)[1:], atol=1e-5)


def _topk_prompt(sampler: Any) -> None:
    reply = done(sampler.sample(prompt(), 1, GREEDY, include_prompt_logprobs=True, topk_prompt_logprobs=3))
    rows = reply.topk_prompt_logprobs
    assert rows[0] is None
    assert [len(row) for row in rows[1:]] == [3] * 7
    assert all(row[0][1] >= row[1][1] >= row[2][1] for row in rows[1:])


def _topk_sample(sampler: Any) -> None:
    sequence = done(sampler.sample(prompt(), 1, GREEDY, topk_sample_logprobs=3)).sequences[0]
    rows = sequence.topk_logprobs
    assert [len(row) for row in rows] == [3] * 5
    assert [row[0][0] for row in rows] == list(sequence.tokens)


def _targets(sampler: Any) -> None:
    wanted = np.array([[t, -1] for t in prompt().to_ints()[1:]], dtype=np.int64)
    given = types.TensorData.from_numpy(wanted)
    reply = done(sampler.sample(prompt(), 1, GREEDY, target_prompt_logprobs=given))
    found = reply.target_prompt_logprobs
    found = np.asarray(found.to_numpy() if hasattr(found, "to_numpy") else found)
    assert np.allclose(found[:, 0], _scored(sampler)[1:], atol=1e-4)
    assert (found[:, 1] == 0).all()


def _alternatives(sampler: Any) -> None:
    reply = done(sampler.sample(prompt(), 1, GREEDY, prompt_alt_tokens_k=2))
    assert reply.prompt_alt_tokens is not None


def _last(found: list[Any]) -> None:
    missing = [x is None or math.isnan(x) for x in found]
    assert missing == [True] * 5 + [False] * 3, found
