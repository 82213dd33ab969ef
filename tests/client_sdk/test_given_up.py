"""A program gives something up, and it fails afterwards: nobody waits for that error, and nothing is logged."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from concurrent.futures import wait
from contextlib import suppress

import pytest
from starlette.responses import JSONResponse, Response
from weft import AdamParams, SamplingParams, ServiceClient
from weft.future import APIFuture

from tests.client_sdk.stub_server import Asked, Stub


def test_who_gave_up_as_it_failed_has_not_been_told() -> None:
    """A group of tasks cancels the others when one fails, and the next step would not know of their errors."""

    async def fails() -> None:
        raise ValueError

    async def story() -> tuple[bool, bool]:
        future = APIFuture.start(fails())
        waiting = asyncio.ensure_future(future.result_async())
        await asyncio.sleep(0)
        wait({future.future()}, 10)  # it has failed, but this loop has not heard of it
        waiting.cancel()
        await asyncio.wait({waiting})
        known = future.known
        with suppress(ValueError):
            await future
        return known, future.known

    assert asyncio.run(story()) == (False, True)


def test_what_is_cancelled_and_fails_afterwards_is_not_logged(
    stub: Stub, service: ServiceClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gc.collect()  # what other tests have left would be told here
    caplog.clear()
    asked, go = threading.Event(), threading.Event()

    def refuse(_asked: Asked) -> Response:
        asked.set()
        go.wait(10)
        return JSONResponse({"error": "the run is closed"}, 400)

    monkeypatch.setattr(stub, "on_optim_step", refuse)
    monkeypatch.setattr(stub, "on_save_weights_for_sampler", refuse)
    run = service.create_lora_training_client("org/tiny").result()
    steps = [run.optim_step(AdamParams()) for _ in range(2)]
    sampler = run.save_weights_and_get_sampling_client()
    drawn = [sampler.sample([1, 2], 1, SamplingParams(max_tokens=1)) for _ in range(2)]
    assert asked.wait(10)
    until = time.monotonic() + 10
    for step in steps:
        step.cancel()
    for sample in drawn:
        sample.cancel()
    go.set()
    while "/save_weights_for_sampler" not in stub.paths() and time.monotonic() < until:
        time.sleep(0.01)
    assert service.close().result() is None
    del steps, drawn, sampler, run, step, sample
    gc.collect()
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []
