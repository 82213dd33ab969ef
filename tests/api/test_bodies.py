"""Request bodies: every route has a size limit, and what is made from a body is bounded before it is made."""

from __future__ import annotations

import asyncio
import json
import re
import time
from contextlib import AsyncExitStack, nullcontext, suppress
from typing import Any

import pytest
import zstandard
from fastapi import Request
from pydantic import BaseModel
from weft.wire.binary import weft_wire_pb2 as pb
from weft.wire.binary.train_codec import ArrayDatum, TrainBatch, encode_train_request
from weft.wire.sampling import SampleRequest
from weft.wire.training import AdamParams, OptimStepRequest

from api.checks.optimizers import check_step
from api.errors import Invalid, Malformed, RateLimited, TooLarge
from api.http import bodies
from api.http.bodies import MAX_RATIO, RATIO_FLOOR_BYTES, parse_json, unpack_zstd
from api.http.body_sizes import SIZES
from api.http.json_forms import train_body
from api.http.structure import HARMLESS_BYTES, MAX_FIELDS, check_json, check_protobuf
from api.server.app import front
from api.state import threads
from api.state.arriving import Arriving
from api.state.large_bodies import AT_A_TIME, MOST_REST_S, REST_TIMES, SMALL_BYTES, LargeBodies, Line, Pool
from tests.api.conftest import World
from tests.tenancy.conftest import Route, member, org_id_of, routes_of, settings as settings

REQUEST = pb.ForwardBackwardRequest
ROUTES = [route for route in routes_of(front()) if not route.path.startswith("/console")]

#: Routes of other services' protocols: conversations are data.
COMPATIBLE = [route for route in ROUTES if not route.path.startswith("/api/")]

#: Routes whose bodies may be larger than those of all others.
LARGER = {
    "POST /api/v1/forward_backward": "data",
    "POST /api/v1/forward": "data",
    "POST /api/v1/asample": "data",
    "POST /api/v1/retrieve_futures": "medium",
    "POST /api/v1/create_custom_loss": "medium",
    "POST /api/v1/weft/runs/{run_id}/metrics": "medium",
    "POST /api/v1/telemetry": "medium",
    "POST /api/v1/stripe/webhook": "event",
}

#: Routes whose method allows a body but which read none (the last one only where payments are enabled).
UNREAD = {
    "POST /api/v1/training_runs/{run_id}/checkpoints/{kind}/{name}/publish",
    "POST /api/v1/stripe/webhook",
}


def size_class(route: Route) -> str:
    assert route.access is not None
    return route.access.body


@pytest.mark.parametrize(("length", "asked"), [("11", 0), ("10", 1)])
def test_who_asks_before_sending_is_told_of_a_length_that_is_too_large(length: str, asked: int) -> None:
    """With `Expect: 100-continue` reading the body means that it is sent."""
    reads = list[int]()

    async def receive() -> dict[str, object]:
        reads.append(1)
        return {"type": "http.request", "body": b"0123456789"}

    headers = [(b"content-length", length.encode()), (b"expect", b"100-Continue")]
    request = Request({"type": "http", "headers": headers}, receive)
    with nullcontext() if asked else pytest.raises(TooLarge, match="limit of 10 bytes"):
        assert asyncio.run(bodies._receive(request, 10, Arriving(10).body(""))) == b"0123456789"
    assert len(reads) == asked


def test_only_routes_of_data_take_large_bodies() -> None:
    larger = {str(r): size_class(r) for r in ROUTES if size_class(r) != "small" and r not in COMPATIBLE}
    assert larger == LARGER
    assert {size_class(r) for r in COMPATIBLE} <= {"small", "medium", "data"}
    assert [name for name, size in SIZES.items() if size.max_bytes is None] == ["data"]
    assert max(size.max_bytes or 0 for size in SIZES.values()) <= 1 << 20


class TestEveryRoute:
    """Each route on its own, with the server's general limit at its largest."""

    @pytest.fixture
    def settings(self, settings):  # type: ignore[no-untyped-def]
        return settings.model_copy(update={"limits": settings.limits.model_copy(update={"max_body_bytes": 1 << 26})})

    def test_refuses_what_is_larger_than_its_size(self, world: World) -> None:
        """Every route that reads its body names the limit."""
        _, key = member(world, "owner")
        unread = set()
        for route in ROUTES:
            most = SIZES[size_class(route)].max_bytes  # type: ignore[index]
            if route.method not in ("POST", "PUT", "PATCH") or most is None:
                continue
            path = route.path.replace("{kind}", "weights").replace("{scope}", "key")
            path = re.sub(r"{[^}]*}", "0", path)
            body = b'{"x": "' + b"y" * most + b'"}'
            reply = world.http.request(route.method, path, headers={"x-api-key": key}, content=body)
            if reply.status_code == 413:
                assert f"limit of {most} bytes" in reply.text
            else:
                unread.add(str(route))
        assert unread == UNREAD
        assert world.call("POST", "create_session", content=b" " * 65_537).status_code == 413


def test_what_is_refused_for_its_length_waits_for_no_room(world: World) -> None:
    limits = world.service.settings.limits.model_copy(update={"max_body_bytes": 2 * SMALL_BYTES})
    object.__setattr__(world.service, "settings", world.service.settings.model_copy(update={"limits": limits}))
    object.__setattr__(world.service, "large_bodies", LargeBodies(2 * SMALL_BYTES, wait_s=0.01))
    portal: Any = world.http.portal
    with portal.wrap_async_context_manager(world.service.large_bodies.room(org_id_of(world), 2 * SMALL_BYTES)):
        statuses = [
            world.call("POST", "forward", content=bytes(2 * SMALL_BYTES + beyond)).status_code for beyond in (0, 1)
        ]
    assert statuses == [429, 413]


class TestPacked:
    def test_a_bomb_is_refused_by_its_ratio(self) -> None:
        bomb = zstandard.compress(bytes(60_000_000))
        with pytest.raises(TooLarge, match=f"{MAX_RATIO} times"):
            unpack_zstd(bomb, 1 << 26)
        stream = zstandard.ZstdCompressor().compressobj()  # without its size in the header
        with pytest.raises(TooLarge, match=f"{MAX_RATIO} times"):
            unpack_zstd(stream.compress(bytes(60_000_000)) + stream.flush(), 1 << 26)

    def test_many_frames_are_one_body(self) -> None:
        frame = zstandard.compress(bytes(1 << 20))
        with pytest.raises(TooLarge):
            unpack_zstd(frame * 50, 1 << 26)

    def test_what_stays_small_may_shrink_as_it_likes(self) -> None:
        assert unpack_zstd(zstandard.compress(bytes(RATIO_FLOOR_BYTES)), 1 << 26) == bytes(RATIO_FLOOR_BYTES)


class TestJson:
    @pytest.mark.parametrize(
        ("body", "what"),
        [
            (b"[" * 70_000, "lists and objects"),
            (b"[]," * 70_000, "lists and objects"),
            (b'"a":1,' * 70_000, "names"),
            (b"1," * 2_100_000, "values"),
        ],
    )
    def test_too_many(self, body: bytes, what: str) -> None:
        with pytest.raises(TooLarge, match=what):
            check_json(body)

    def test_a_long_prompt_and_a_batch_of_the_largest_size_pass(self) -> None:
        check_json(b"[" + b"151643," * 1_500_000 + b"1]")
        datum = b'{"model_input":{"chunks":[{"type":"encoded_text","tokens":[1,2]}]},"loss_fn_inputs":{"target_tokens":'
        datum += b'{"data":[1,2],"dtype":"int64"},"weights":{"data":[1.0,1.0],"dtype":"float32"}}},'
        check_json(datum * 4096)

    def test_a_list_is_not_read_beyond_its_first_mistake(self, world: World) -> None:
        tokens = ["x"] * 200
        body = {"sampling_session_id": "s", "seq_id": 1, "sampling_params": {}}
        body["prompt"] = {"chunks": [{"type": "encoded_text", "tokens": tokens}]}
        detail = world.post("asample", body, status=422)["detail"]
        assert "tokens.0:" in detail
        assert "tokens.1:" not in detail

    def test_a_thousand_mistakes_are_not_listed(self, world: World) -> None:
        started = time.process_time()
        reply = world.call("POST", "create_session", json={f"f{n}": 1 for n in range(1500)})
        assert reply.status_code == 422
        assert "fields of the body are wrong" in reply.json()["detail"]
        assert time.process_time() - started < 5


def field(number: int, inside: bytes, size: int | None = None) -> bytes:
    length, left = b"", len(inside) if size is None else size
    while left >= 0x80:
        length, left = length + bytes([left & 0x7F | 0x80]), left >> 7
    return bytes([number << 3 | 2]) + length + bytes([left]) + inside


class TestProtobuf:
    @pytest.mark.parametrize(
        "body",
        [
            field(3, b"") * (MAX_FIELDS + 1),  # data
            field(3, field(1, b"") * (MAX_FIELDS + 1)),  # chunks
            field(3, field(1, b"") * 1000) * 300,  # in many data
            field(3, field(2, b"") * (MAX_FIELDS + 1)),  # inputs
            field(3, field(3, field(1, b"")) * MAX_FIELDS),  # spans
            field(3, field(2, field(2, field(4, b"\1" * 100_000)))),  # a shape, packed
            field(3, field(2, field(2, b"\x20\1" * (MAX_FIELDS + 1)))),  # a shape, number by number
            field(4, b"x") * (MAX_FIELDS + 1),  # the name of the loss, again and again
            field(15, b"") * (MAX_FIELDS + 1),  # unknown
        ],
        ids=["data", "chunks", "chunks of many", "inputs", "spans", "packed", "shape", "again", "unknown"],
    )
    def test_too_many(self, body: bytes) -> None:
        with pytest.raises(TooLarge, match=r"protobuf|packed"):
            check_protobuf(body, REQUEST)

    @pytest.mark.parametrize(
        "body",
        [
            field(4, bytes(HARMLESS_BYTES)) + b"\xff" * 20,
            b"\x1b" * (HARMLESS_BYTES + 1),  # groups
            field(3, bytes(HARMLESS_BYTES), size=HARMLESS_BYTES + 9),
            field(3, field(1, field(1, bytes(HARMLESS_BYTES))) + b"\x1a"),
            b"\x1a\xff",
        ],
    )
    def test_what_is_no_protobuf_is_refused_or_left_to_the_parser(self, body: bytes) -> None:
        if len(body) > HARMLESS_BYTES:
            with pytest.raises(Invalid):
                check_protobuf(body, REQUEST)
        else:
            check_protobuf(body, REQUEST)

    def test_batches_pass(self) -> None:
        import numpy as np

        tokens = np.arange(50, dtype=np.int32)
        inputs = {name: np.ones(50, dtype=np.float32) for name in ("weights", "logprobs", "advantages")}
        datum = ArrayDatum(tokens, inputs | {"target_tokens": tokens.astype(np.int64)})
        check_protobuf(encode_train_request(TrainBatch("r", 1, "ppo", data=[datum] * 4096)), REQUEST)


class TestRoom:
    MOST = 10 * SMALL_BYTES

    def test_a_slow_sender_holds_up_its_own_organisation_alone(self) -> None:
        async def scene() -> None:
            bodies = LargeBodies(self.MOST, wait_s=0.05)
            async with bodies.room("a", self.MOST), bodies.room("b", self.MOST), bodies.room("c", self.MOST):
                with pytest.raises(RateLimited, match="this organisation"):
                    async with bodies.room("a", SMALL_BYTES + 1):
                        pass
                for size_bytes in (SMALL_BYTES, 1):
                    async with bodies.room("a", size_bytes) as small, bodies.room("d", self.MOST) as large:
                        await small.work()
                        await large.work()
            async with bodies.room("a", self.MOST):
                pass

        asyncio.run(scene())

    def test_few_are_worked_on_at_a_time(self) -> None:
        async def scene() -> None:
            bodies = LargeBodies(self.MOST, wait_s=0.05)
            async with AsyncExitStack() as stack:
                for number in range(AT_A_TIME):
                    room = await stack.enter_async_context(bodies.room(f"org {number}", self.MOST))
                    for _ in range(2):  # the same body again takes no more room
                        await room.work()
                for size_bytes in (SMALL_BYTES, 1):
                    async with bodies.room("small", size_bytes) as small:
                        await small.work()
                last = await stack.enter_async_context(bodies.room("last", self.MOST))
                with pytest.raises(RateLimited, match="this server"):
                    await last.work()
            async with bodies.room("last", self.MOST) as room:
                await room.work()

        asyncio.run(scene())

    def test_who_waits_comes_in_order_and_room_is_given_back(self) -> None:
        async def scene() -> list[int]:
            bodies, order = LargeBodies(self.MOST, wait_s=5), []

            async def one(number: int, size_bytes: int) -> None:
                async with bodies.room("a", size_bytes) as room:
                    await room.work()
                    order.append(number)
                    await asyncio.sleep(0)

            whole, half = self.MOST, self.MOST // 2
            async with asyncio.timeout(5):
                await asyncio.gather(*(one(n, size) for n, size in enumerate([half, whole, half, half, whole])))
                async with bodies.room("a", whole):
                    cancelled = asyncio.create_task(one(9, whole))
                    await asyncio.sleep(0)
                    cancelled.cancel()
                async with bodies.room("a", whole) as room:
                    await room.work()
            return order

        assert asyncio.run(scene()) == [0, 1, 2, 3, 4]

    def test_all_that_an_organisation_has_in_hand_counts(self) -> None:
        async def scene() -> None:
            bodies, part = LargeBodies(self.MOST, wait_s=0.05), self.MOST // 5
            async with bodies.room("a", 2 * part):
                async with bodies.room("a", 2 * part):
                    pass
                with pytest.raises(RateLimited, match="this organisation"):
                    async with bodies.room("a", 4 * part):
                        pass

        asyncio.run(scene())

    def test_who_waits_for_room_stands_in_line_as_who_waits_for_threads(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """So many of them are let in, for each holds a connection."""
        monkeypatch.setattr(threads, "MOST_WAITING", 1)

        async def scene() -> None:
            bodies = LargeBodies(self.MOST, wait_s=60)

            async def one() -> None:
                async with bodies.room("a", self.MOST):
                    pass

            async with bodies.room("a", self.MOST):
                threads.check_line("a")
                waits = asyncio.create_task(one())
                await asyncio.sleep(0)
                with pytest.raises(RateLimited, match="1 requests of this organisation wait in line"):
                    threads.check_line("a")
                threads.check_line("b")
            await waits
            threads.check_line("a")

        asyncio.run(scene())

    def test_who_gives_up_lets_in_who_stands_behind(self) -> None:
        async def scene() -> None:
            bodies, part = LargeBodies(self.MOST, wait_s=60), self.MOST // 5

            async def one(size_bytes: int) -> None:
                async with bodies.room("a", size_bytes):
                    pass

            async with asyncio.timeout(30), bodies.room("a", 2 * part):
                large, small = asyncio.create_task(one(4 * part)), asyncio.create_task(one(part))
                for _ in range(5):
                    await asyncio.sleep(0)
                assert not large.done()
                assert not small.done(), "it would keep the large one out"
                large.cancel()
                await small

        asyncio.run(scene())

    def test_slow_readers_of_many_organisations_are_bounded_and_leave_room_to_the_next(self) -> None:
        async def scene() -> None:
            pool, small = Pool(8 * self.MOST), SMALL_BYTES + 1
            polls, answers = (LargeBodies(self.MOST, wait_s, "results", pool) for wait_s in (0.01, 60))
            async with AsyncExitStack() as held:
                for number in range(7):
                    await held.enter_async_context(polls.room(f"org {number}", self.MOST))
                with pytest.raises(
                    RateLimited, match=f"this server has in hand at a time may be {8 * self.MOST} bytes"
                ):
                    await held.enter_async_context(polls.room("next", self.MOST))
                waits = asyncio.create_task(held.enter_async_context(answers.room("next", self.MOST)))
                for number in range(3):  # each finds room for half of the rest
                    await held.enter_async_context(polls.room(f"small {number}", small))
                with pytest.raises(RateLimited, match="this organisation"):
                    await held.enter_async_context(polls.room("org 0", small))
                assert not waits.done()
                async with asyncio.timeout(30):
                    await held.aclose()
                    await waits
            assert (pool._free, pool._lines) == (pool.most, {})

        asyncio.run(scene())

    def test_a_rest_is_nine_times_what_only_reading_the_body_could_find_took_and_ends(self) -> None:
        async def scene() -> None:
            bodies, loop = LargeBodies(self.MOST), asyncio.get_running_loop()
            for status, rests in ((400, True), (404, True), (413, True), (422, True), (403, False), (503, False)):
                error, org_id = Invalid("wrong"), f"org {status}"
                error.status = status
                begun = loop.time()
                with suppress(Invalid):
                    async with bodies.room(org_id, self.MOST) as room:
                        await room.work()
                        await asyncio.sleep(0.01)
                        raise error
                took = loop.time() - begun
                assert (org_id in bodies._orgs) == rests
                if rests:
                    left = bodies._orgs[org_id].rests_until - loop.time()
                    assert 0 < left <= REST_TIMES * took
            line = Line("server", self.MOST, 1.0)
            line.rest(1.0)
            line.rest(1.0)
            assert 1.0 < line.rests_until - loop.time() <= 2.0
            line.rest(60.0)
            assert line.rests_until - loop.time() <= MOST_REST_S

        asyncio.run(scene())

    def test_who_was_refused_rests_and_nobody_else(self) -> None:
        async def scene() -> None:
            bodies = LargeBodies(self.MOST, wait_s=5)
            with suppress(Invalid):
                async with bodies.room("a", self.MOST) as room:
                    await room.work()
                    await asyncio.sleep(0.05)
                    raise Invalid("wrong")
            told = time.monotonic()
            async with asyncio.timeout(0.2), bodies.room("b", self.MOST), bodies.room("a", SMALL_BYTES):
                pass
            async with bodies.room("a", self.MOST) as room:
                assert time.monotonic() - told >= 0.9 * REST_TIMES * 0.05
                await room.work()
            begun = time.monotonic()
            async with bodies.room("a", self.MOST) as room:  # that request succeeded
                await room.work()
                await asyncio.sleep(0.05)
                room.refused = True  # and this error comes through its future
            async with bodies.room("a", self.MOST):
                assert time.monotonic() - begun >= 0.9 * REST_TIMES * 0.05
            await asyncio.sleep(0.1)
            assert not bodies._orgs, "an organisation that has rested is forgotten"

        asyncio.run(scene())


@pytest.mark.parametrize(
    ("model", "given", "field"),
    [
        (SampleRequest, '"num_samples": true', "num_samples"),
        (SampleRequest, '"num_samples": "2"', "num_samples"),
        (SampleRequest, '"num_samples": 2.0', "num_samples"),
        (SampleRequest, '"prompt_logprobs": "yes"', "prompt_logprobs"),
        (SampleRequest, '"sampling_params": {"temperature": "0.5"}', "sampling_params.temperature"),
        (
            SampleRequest,
            '"target_prompt_logprobs": {"data": [true], "dtype": "int64"}',
            r"target_prompt_logprobs\.data",
        ),
        (SampleRequest, '"sampling_params": {"stop": [true]}', "sampling_params.stop"),
        (SampleRequest, '"prompt": {"chunks": [{"type": "encoded_text", "tokens": [true]}]}', "prompt.chunks"),
        (OptimStepRequest, '"adam_params": {"learning_rate": true}', "adam_params.learning_rate"),
        (OptimStepRequest, '"adam_params": {}, "seq_id": "1"', "seq_id"),
    ],
)
def test_in_the_protocol_nothing_is_taken_for_a_value_of_another_type(
    model: type[BaseModel], given: str, field: str
) -> None:
    """In the forms of OpenAI and vLLM, "2" and 2.0 are read as theirs do: tests/api/openai/test_bodies.py."""
    needed = {SampleRequest: {"prompt": {"chunks": []}, "sampling_params": {}}, OptimStepRequest: {"model_id": "m"}}
    body = f"{json.dumps(needed[model])[:-1]}, {given}}}".encode()
    with pytest.raises(Malformed, match=f"^{field}"):
        parse_json(body, model)


@pytest.mark.parametrize(
    ("value", "dtype"), [("1e39", "float32"), ("0.5", "int64"), ("1e19", "int64"), ("true", "int64")]
)
def test_a_number_of_a_tensor_stays_what_it_is(value: str, dtype: str) -> None:
    """1e39 became infinite."""
    inputs = f'{{"weights": {{"data": [{value}], "dtype": "{dtype}"}}}}'
    datum = f'{{"model_input": {{"chunks": []}}, "loss_fn_inputs": {inputs}}}'
    given = f'{{"data": [{datum}], "loss_fn": "cross_entropy"}}'
    with pytest.raises(Malformed, match=r"data\.0\.loss_fn_inputs\.weights"):
        train_body(f'{{"model_id": "m", "seq_id": 1, "forward_backward_input": {given}}}'.encode(), False)


@pytest.mark.parametrize("rate", [True, "0.1", None])
def test_other_optimizers_are_told_numbers(rate: Any) -> None:
    step = OptimStepRequest(model_id="m", optimizer_params={"type": "dimuon", "learning_rate": rate})
    with pytest.raises(Malformed, match=r"^optimizer_params: learning_rate"):
        check_step(step, "dimuon")


def test_a_whole_number_is_a_number() -> None:
    body = b'{"model_id": "m", "adam_params": {"learning_rate": 1}}'
    assert parse_json(body, OptimStepRequest).adam_params == AdamParams(learning_rate=1.0)
