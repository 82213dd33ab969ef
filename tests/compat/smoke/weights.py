"""Saving, loading, exporting and copying weights."""

from __future__ import annotations

import io
import json
import tarfile
import urllib.request
from typing import Any

import numpy as np
from smoke.data import ADAM, supervised
from smoke.record import Tour, done, refusal
from smoke.training import forward


def save(tour: Tour, service: Any, run: Any) -> dict[str, str | None]:
    """Save `run` in every form and load it again. Returns the paths: `state`, `sampler`, `external`."""
    state = tour.call("TrainingClient.save_state", lambda: done(run.save_state("s1")).path)
    sampler = tour.call(
        "TrainingClient.save_weights_for_sampler", lambda: done(run.save_weights_for_sampler("w1")).path
    )
    there = forward(run)
    going = _go_on(run)
    done(run.save_state("s2"))
    taken = "TrainingClient.save_state: a name that is taken, then overwritten"
    tour.call(taken, lambda: _names(run), takes=("overwrite",))
    tour.call("TrainingClient.save_state: with a ttl", lambda: done(run.save_state("short", ttl_seconds=7200)))
    _load(tour, service, run, state, there, going)
    external = tour.call(
        "TrainingClient.save_weights_external", lambda: done(run.save_weights_external("x1", ttl_seconds=3600)).path
    )
    return {"state": state, "sampler": sampler, "external": external}


def _load(tour: Tour, service: Any, run: Any, state: str | None, there: Any, going: Any) -> None:
    tour.call("TrainingClient.load_state", lambda: (done(run.load_state(state)), _same(forward(run), there)))
    tour.call(
        "TrainingClient.load_state_with_optimizer",
        lambda: (done(run.load_state_with_optimizer(state)), _same(_go_on(run), going)),
    )
    tour.call(
        "ServiceClient.create_training_client_from_state",
        lambda: _same(forward(done(service.create_training_client_from_state(state))), there),
    )
    tour.call(
        "ServiceClient.create_training_client_from_state_with_optimizer",
        lambda: _same(_go_on(done(service.create_training_client_from_state_with_optimizer(state))), going),
    )


def download(tour: Tour, rest: Any, service: Any, run: Any, paths: dict[str, str | None]) -> None:
    """Download weights from the server, and copy them on it."""
    sampler, state = paths["sampler"], paths["state"]
    run_id, name = run.model_id, "sampler_weights/w1"
    tour.call(
        "RestClient.get_checkpoint_archive_url",
        lambda: _archive(done(rest.get_checkpoint_archive_url(run_id, name)).url),
    )
    tour.call(
        "RestClient.get_checkpoint_archive_url_from_tinker_path",
        lambda: _archive(done(rest.get_checkpoint_archive_url_from_tinker_path(sampler)).url),
    )
    tour.call(
        "RestClient.get_external_weights_urls",
        lambda: _files(done(rest.get_external_weights_urls(paths["external"])).urls),
    )
    tour.call("ServiceClient.copy_weights", lambda: _is_path(done(service.copy_weights(state)), "weights"))
    tour.call("RestClient.copy_weights", lambda: _is_path(done(rest.copy_weights(sampler)), "sampler_weights"))


def _go_on(run: Any) -> list[np.ndarray]:
    """One more step and the logprobs after it, which depend on the optimizer's state too."""
    done(run.forward_backward(supervised(), "cross_entropy"))
    done(run.optim_step(ADAM))
    return forward(run)


def _same(found: list[np.ndarray], expected: list[np.ndarray]) -> None:
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a, b)


def _names(run: Any) -> None:
    assert "s2" in refusal(lambda: done(run.save_state("s2")))
    done(run.save_state("s2", overwrite=True))


def _archive(url: str) -> None:
    with urllib.request.urlopen(url, timeout=60) as reply:
        whole = io.BytesIO(reply.read())
    with tarfile.open(fileobj=whole) as archive:
        names = archive.getnames()
    base = {name.rsplit("/", 1)[-1] for name in names}
    assert {"adapter_model.safetensors", "adapter_config.json"} <= base, names


def _files(urls: dict[str, str]) -> None:
    assert {"adapter_model.safetensors", "adapter_config.json"} <= set(urls), urls
    with urllib.request.urlopen(urls["adapter_config.json"], timeout=60) as reply:
        assert json.loads(reply.read())["r"] == 8


def _is_path(path: str, kind: str) -> None:
    assert path.startswith("tinker://"), path
    assert f"/{kind}/" in path, path
