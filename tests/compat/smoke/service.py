"""The service client itself, and the asynchronous twins of its methods."""

from __future__ import annotations

import asyncio
from typing import Any

import tinker
from smoke.data import ADAM, GREEDY, prompt, supervised
from smoke.record import Tour, done, refusal


def first(tour: Tour, service: Any, model: str) -> Any:
    """All that can be asked before anything is trained. Returns a RestClient."""
    tour.call(
        "ServiceClient.get_server_capabilities",
        lambda: _has([m.model_name for m in service.get_server_capabilities().supported_models], model),
    )
    return tour.call("ServiceClient.create_rest_client", lambda: service.create_rest_client())


def refusals(tour: Tour, service: Any) -> None:
    """Requests for what this server does not have are refused with the reason, not ignored."""
    tour.call("ServiceClient.create_lora_training_client: an unknown base model is refused", lambda: _unknown(service))


def asynchronous(tour: Tour, model: str) -> None:
    """One whole loop with the `_async` methods."""

    async def loop() -> None:
        service = tinker.ServiceClient()
        run = await service.create_lora_training_client_async(model, rank=4, train_mlp=False)
        step = await run.forward_backward_async(supervised(), "cross_entropy")
        update = await run.optim_step_async(ADAM)
        assert "loss:sum" in (await step.result_async()).metrics
        await update.result_async()
        saved = await (await run.save_state_async("a1")).result_async()
        sampler = await run.save_weights_and_get_sampling_client_async()
        assert len((await sampler.sample_async(prompt(), 1, GREEDY)).sequences[0].tokens) == 5
        assert len(await sampler.compute_logprobs_async(prompt())) == 8
        again = await service.create_training_client_from_state_async(saved.path)
        assert len((await (await again.forward_async(supervised(), "cross_entropy"))).loss_fn_outputs) == 3

    tour.call("the asynchronous methods", lambda: asyncio.run(asyncio.wait_for(loop(), 120)))


def close(tour: Tour, service: Any) -> None:
    tour.call("ServiceClient.close", lambda: done(service.close("success")))


def custom_loss(tour: Tour, service: Any, run: Any) -> None:
    """A loss that is traced, uploaded and then named by its handle."""

    def squares(logprobs: Any, weights: Any) -> Any:
        return (weights * logprobs**2).sum(), {}

    handle = tour.call(
        "ServiceClient.create_custom_loss",
        lambda: done(service.create_custom_loss(squares, {"logprobs": 1, "weights": 1})),
    )
    tour.call(
        "TrainingClient.forward_backward_custom: by its handle",
        lambda: _step_with(run, handle),
        () if handle is not None else ("this version has no handles",),
    )


def _step_with(run: Any, handle: Any) -> None:
    assert done(run.forward_backward_custom(supervised(), handle)).metrics["loss:sum"] > 0
    done(run.optim_step(ADAM))


def _unknown(service: Any) -> None:
    assert "nobody/nothing" in refusal(lambda: done(service.create_lora_training_client("nobody/nothing")))


def _has(found: list[Any], expected: Any) -> None:
    assert expected in found, (expected, found)
