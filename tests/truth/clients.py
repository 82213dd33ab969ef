"""The clients of a program.

They send its operations over HTTP, as often and in the order that the schedule says, and keep all answers. They behave
as the SDK's clients do: a request that is not answered, or answered with a 5xx, is sent again with the same sequence
number; a result is polled until it is there."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from weft.loss_handle import trace
from weft.wire.binary.sample_codec import decode_sample_response
from weft.wire.binary.train_codec import ArrayDatum, TrainBatch, decode_train_output, encode_train_request
from weft.wire.losses import CreateCustomLossRequest

from tests.truth.programs import (
    CUSTOM,
    VOCAB,
    Bad,
    Batch,
    Create,
    Datum,
    EndSession,
    Forward,
    ForwardBackward,
    Load,
    Planned,
    Resume,
    Sample,
    SaveSampler,
    SaveState,
    Step,
    TwoPass,
    chunks_of,
    custom_inputs,
    custom_loss,
    data_of,
    kind_of_run,
    organisation,
    prompt_of,
    two_pass_weights,
)
from tests.truth.world import MODEL, Reply, ServerLost, World

JSON, PROTOBUF = "application/json", "application/x-protobuf"

#: Statuses after which clients try again.
AGAIN = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
MOST_TRIES = 400

#: The number of the sampler of a session's base model.
BASE_SAMPLER = 900

#: How an operation ends for its client: ("result", content) or ("error", category, text).
Outcome = tuple[Any, ...]


class Unanswered(AssertionError):
    """The service has given no answer."""


class Clients:
    def __init__(self, world: World, steps: Sequence[Planned]) -> None:
        self.outcomes: dict[str, Outcome] = {}  # by its operation's place and its part
        self.request_ids: dict[str, str] = {}  # label of an operation, by request id
        self.sessions: dict[int, str] = {}
        self.counts: Counter[str] = Counter()
        self._world, self._steps = world, steps
        self._runs: dict[int, str] = {}
        self._answered = [asyncio.Event() for _ in steps]
        self._accepted = [asyncio.Event() for _ in steps]
        self._base: dict[int, asyncio.Task[Any]] = {}
        for each in steps:
            if isinstance(each.op, Create | Resume):
                self._runs[each.op.run] = f"{{{each.session}}}:train:{each.model_seq}"

    async def play(self) -> None:
        for session in dict.fromkeys(each.session for each in self._steps):
            await self._open_session(session)
        if self._world.schedule.patient:
            for each in self._steps:
                await self._step(each)
        else:
            await asyncio.gather(*(self._step(each) for each in self._steps))

    def run_id(self, run: int) -> str:
        text = self._runs[run]
        session = int(text[1 : text.index("}")])
        return self.sessions[session] + text[text.index("}") + 1 :]

    def plain(self, text: str) -> str:
        """`text` with the ids that differ between worlds replaced by names."""
        for number, session_id in self.sessions.items():
            text = text.replace(session_id, f"session-{number}")
        for request_id, label in self.request_ids.items():
            text = text.replace(request_id, f"operation-{label}")
        return text

    # -- sessions

    async def _open_session(self, session: int) -> None:
        body = {"tags": [], "user_metadata": {}, "sdk_version": "truth", "display_name": f"session {session}"}
        reply = await self._send(session, "create_session", body | {"type": "create_session"})
        self.sessions[session] = reply.json()["session_id"]
        batches = [each.op.batch for each in self._steps if each.session == session and hasattr(each.op, "batch")]
        if any(batch.loss == CUSTOM for batch in batches):
            await self._upload_loss(session)

    async def _upload_loss(self, session: int) -> None:
        handle = trace(custom_loss, {"logprobs": 1, "advantages": 1, "q": 1})
        request = CreateCustomLossRequest(
            session_id=self.sessions[session],
            custom_loss_seq_id=0,
            name=handle.name,
            inputs=list(handle.inputs),
            graph=handle.encoded(),
        )
        reply = await self._send(session, "create_custom_loss", request.body())
        assert reply.status == 200, reply.body

    # -- steps

    async def _step(self, each: Planned) -> None:
        for place in sorted(each.answered):
            await self._answered[place].wait()
        for place in sorted(each.accepted):
            await self._accepted[place].wait()
        if not self._world.schedule.patient:
            schedule = self._world.schedule
            await asyncio.sleep(schedule.pace_s * each.place + self._world.random.uniform(0, schedule.jitter_s))
        await self._perform(each)
        self._accepted[each.place].set()
        self._answered[each.place].set()

    async def _perform(self, each: Planned) -> None:
        match each.op:
            case TwoPass():
                await self._two_pass(each, each.op)
            case Sample():
                await self._sample(each, each.op)
            case EndSession():
                await self._end(each)
            case SaveSampler():
                await self._save_sampler(each, each.op)
            case _:
                await self._operate(each, self._requests(each))

    def _requests(self, each: Planned) -> list[tuple[str, bytes, str]]:
        """The requests of an operation, in the order of their numbers: path, body, content type."""
        op, session = each.op, self.sessions[each.session]
        match op:
            case Create():
                config = {"rank": op.rank, "seed": op.seed, "train_attn": op.attn, "train_mlp": op.mlp}
                body = {
                    "session_id": session,
                    "model_seq_id": each.model_seq,
                    "base_model": MODEL,
                    "lora_config": config | {"train_unembed": op.unembed},
                    "optimizer_config": {"type": op.optimizer},
                    "type": "create_model",
                }
                return [_json("create_model", body)]
            case Resume():
                body = {"session_id": session, "model_seq_id": each.model_seq, "type": "load_weights"}
                return [_json("load_weights", body | {"path": self._path(op.source), "optimizer": op.optimizer})]
            case Load():
                body = {"path": self._path(op.source), "optimizer": op.optimizer, "type": "load_weights"}
                return [_json("load_weights", self._address(each) | body)]
            case SaveState():
                body = {"path": f"n{op.name}", "overwrite": op.overwrite, "type": "save_weights"}
                return [_json("save_weights", self._address(each) | body)]
            case Step():
                return [_json("optim_step", self._address(each) | self._parameters(op))]
            case Forward() | ForwardBackward():
                return self._train(each, op)
            case Bad():
                return [self._bad(each, op)]
        raise AssertionError(op)

    def _address(self, each: Planned, part: int = 0) -> dict[str, Any]:
        return {"model_id": self.run_id(each.op.run), "seq_id": each.seqs[part]}  # type: ignore[union-attr]

    def _path(self, source: tuple[int, int]) -> str:
        return f"tinker://{self.run_id(source[0])}/weights/n{source[1]}"

    def _parameters(self, op: Step) -> dict[str, Any]:
        if kind_of_run(self._steps, op.run).optimizer == "dimuon":
            params = {"learning_rate": op.learning_rate, "beta1": op.beta1, "grad_clip_norm": op.grad_clip_norm}
            return {"optimizer_params": {"type": "dimuon", **params}, "heard_of": 0, "type": "optim_step"}
        names = ("learning_rate", "beta1", "beta2", "eps", "weight_decay", "grad_clip_norm")
        return {"adam_params": {name: getattr(op, name) for name in names}, "heard_of": 0, "type": "optim_step"}

    def _train(self, each: Planned, op: Forward | ForwardBackward) -> list[tuple[str, bytes, str]]:
        data = data_of(op.batch)
        return [
            self._train_request(each, part, op.batch, data[start:stop], isinstance(op, Forward))
            for part, (start, stop) in enumerate(chunks_of(op.batch.lengths, op.chunks))
        ]

    def _train_request(
        self, each: Planned, part: int, batch: Batch, data: Sequence[Datum], forward_only: bool
    ) -> tuple[str, bytes, str]:
        config: dict[str, Any] = dict(batch.config)
        if batch.loss == CUSTOM:
            config = {"loss_id": f"{self.sessions[each.session]}:loss:0"}
        rows = [ArrayDatum(d.tokens, custom_inputs(d) if batch.loss == CUSTOM else d.inputs) for d in data]
        address = self._address(each, part)
        whole = TrainBatch(address["model_id"], address["seq_id"], batch.loss, config, forward_only, rows)
        return "forward_backward", encode_train_request(whole), PROTOBUF

    def _bad(self, each: Planned, op: Bad) -> tuple[str, bytes, str]:
        if op.fault == "path":
            path = f"tinker://{self.run_id(op.run)}/weights/nobody"
            return _json("load_weights", self._address(each) | {"path": path, "optimizer": True})
        if op.fault == "optimizer":
            dimuon = kind_of_run(self._steps, op.run).optimizer == "dimuon"
            params = {"adam_params": {}} if dimuon else {"optimizer_params": {"type": "dimuon", "learning_rate": 0.1}}
            return _json("optim_step", self._address(each) | params)
        batch = replace(op.batch, loss="cross_entropy", config=(), targets=1)
        data = data_of(batch)
        last = data[-1]
        match op.fault:
            case "token":
                last.tokens[-1] = VOCAB
            case "lengths":
                last.inputs["target_tokens"] = np.append(last.inputs["target_tokens"], 1)
            case "nan":
                last.inputs["weights"][0] = np.nan
            case "overflow":
                last.inputs["weights"][:] = 3e38
        if op.fault == "loss":
            batch = replace(batch, loss="nobody")
        return self._train_request(each, 0, batch, data, False)

    async def _operate(self, each: Planned, requests: Sequence[tuple[str, bytes, str]]) -> None:
        parts = list(enumerate(requests))
        if not self._world.schedule.patient:
            self._world.random.shuffle(parts)
        ids = {}
        for part, (path, body, kind) in parts:
            ids[part] = await self._submit(each, part, path, body, kind)
        self._accepted[each.place].set()
        for part in sorted(ids):
            await self._fetch(each, part, ids[part])

    async def _two_pass(self, each: Planned, op: TwoPass) -> None:
        batch = replace(op.batch, loss="cross_entropy", config=(), targets=1)
        data = data_of(batch)
        first = await self._submit(each, 0, *self._train_request(each, 0, batch, data, True))
        outcome = await self._fetch(each, 0, first)
        second = data
        if outcome[0] == "result":
            outputs, _ = decode_train_output(outcome[1])
            second = [
                Datum(d.tokens, d.inputs | {"weights": two_pass_weights(d, row["logprobs"])})
                for d, row in zip(data, outputs, strict=True)
            ]
        last = await self._submit(each, 1, *self._train_request(each, 1, batch, second, False))
        self._accepted[each.place].set()
        await self._fetch(each, 1, last)

    async def _save_sampler(self, each: Planned, op: SaveSampler) -> None:
        address = self._address(each) | {"type": "save_weights_for_sampler"}
        if op.kind != "named":
            body = address | {"sampling_session_seq_id": each.sampler_seq, "kind": op.kind}
            await self._operate(each, [_json("save_weights_for_sampler", body)])
            return
        name = f"s{op.sampler}"
        await self._operate(each, [_json("save_weights_for_sampler", address | {"path": name})])
        path = f"tinker://{self.run_id(op.run)}/sampler_weights/{name}"
        reply = await self._new_sampler(each.session, each.sampler_seq, {"model_path": path})
        self.outcomes[f"{each.place}.1"] = ("result" if reply.status == 200 else "refused", reply.status)

    async def _new_sampler(self, session: int, number: int, of: dict[str, str]) -> Reply:
        body = {"session_id": self.sessions[session], "sampling_session_seq_id": number}
        return await self._send(session, "create_sampling_session", body | of | {"type": "create_sampling_session"})

    async def _sample(self, each: Planned, op: Sample) -> None:
        if op.sampler is None:
            number = BASE_SAMPLER
            if each.session not in self._base:
                making = self._new_sampler(each.session, number, {"base_model": MODEL})
                self._base[each.session] = asyncio.ensure_future(making)
            await self._base[each.session]
        else:
            number = next(
                e.sampler_seq
                for e in self._steps
                if isinstance(e.op, SaveSampler) and e.op.sampler == op.sampler and e.place < each.place
            )
        params = {"max_tokens": op.max_tokens, "seed": op.seed, "temperature": op.temperature}
        body = {
            "sampling_session_id": f"{self.sessions[each.session]}:sample:{number}",
            "seq_id": each.sampler_seq + 1,
            "prompt": {"chunks": [{"tokens": prompt_of(op), "type": "encoded_text"}]},
            "sampling_params": params,
            "num_samples": op.num_samples,
            "type": "sample",
        }
        request_id = await self._submit(each, 0, *_json("asample", body))
        self._accepted[each.place].set()
        await self._fetch(each, 0, request_id)

    async def _end(self, each: Planned) -> None:
        path = f"sessions/{self.sessions[each.session]}/finish"
        reply = await self._send(each.session, path, {"reason": {"type": "success"}})
        self.outcomes[f"{each.place}.0"] = ("status", reply.status)

    # -- requests

    async def _submit(self, each: Planned, part: int, path: str, body: bytes, kind: str) -> str | None:
        """Have an operation accepted and return its request id. A repeat must get the same id."""
        world, label = self._world, f"{each.place}.{part}"

        async def once(delay_s: float) -> Reply:
            await asyncio.sleep(delay_s)
            return await self._until_answered(each.session, path, body, kind)

        copies = [0.0]
        if not world.schedule.patient:
            while len(copies) < 4 and world.random.random() < world.schedule.duplicates:
                copies.append(world.random.choice((0.0, 0.001, 0.05, 1.0)))
            if world.random.random() < world.schedule.lost_replies:
                self.counts["replies lost"] += 1
                await self._until_answered(each.session, path, body, kind)
        self.counts["duplicates"] += len(copies) - 1
        replies = await asyncio.gather(*map(once, copies))
        ids = {reply.json().get("request_id") for reply in replies}
        if len(ids) > 1:
            raise AssertionError(f"operation {label} was given several ids: {ids}")
        request_id = ids.pop()
        self.counts["operations"] += 1
        if request_id is None:
            self.outcomes[label] = ("refused", replies[0].status, self.plain(replies[0].body.decode()))
            return None
        self.request_ids[request_id] = label
        return str(request_id)

    async def _fetch(self, each: Planned, part: int, request_id: str | None) -> Outcome:
        label = f"{each.place}.{part}"
        if request_id is None:
            return self.outcomes[label]
        body = json.dumps({"request_id": request_id, "allow_metadata_only": False}).encode()
        for _ in range(MOST_TRIES):
            reply = await self._until_answered(each.session, "retrieve_future", body, JSON, poll=True)
            if reply.status != 408:
                break
        else:
            raise Unanswered(f"operation {label} {each.op} has no result: {reply.body.decode()}")
        found = self.outcomes[label] = self._read(each, reply)
        return found

    def _read(self, each: Planned, reply: Reply) -> Outcome:
        if reply.status != 200:
            return "status", reply.status, self.plain(reply.body.decode())
        if isinstance(each.op, Sample):
            if not reply.body.startswith(b"{"):
                return "result", self._sample_of(reply.body)
        elif isinstance(each.op, Forward | ForwardBackward | TwoPass | Bad) and not reply.body.startswith(b'{"error'):
            return "result", reply.body
        content = reply.json()
        if "error" in content:
            return "error", content["category"], self.plain(content["error"])
        return "result", self.plain(json.dumps(content, sort_keys=True))

    def _sample_of(self, payload: bytes) -> Any:
        """The tokens and the bits of their logprobs. How much of a prompt was cached depends on earlier requests, so it
        does not belong to the answer."""
        result = decode_sample_response(payload)
        return tuple(
            (
                tuple(sequence.tokens.tolist()),
                None if sequence.logprobs is None else sequence.logprobs.tobytes(),
                sequence.stop_reason,
                tuple((span.version, span.length) for span in sequence.policy),
            )
            for sequence in result.sequences
        )

    async def _send(self, session: int, path: str, body: dict[str, Any]) -> Reply:
        return await self._until_answered(session, path, json.dumps(body).encode(), JSON)

    async def _until_answered(self, session: int, path: str, body: bytes, kind: str, *, poll: bool = False) -> Reply:
        reply = None
        for _ in range(MOST_TRIES):
            self.counts["requests"] += 1
            try:
                reply = await self._world.request(organisation(session), "POST", path, body, kind)
            except ServerLost:
                self.counts["requests cut off"] += 1
            else:
                if reply.status not in AGAIN or (poll and reply.status == 408):
                    return reply
                self.counts[f"answers {reply.status}"] += 1
            await asyncio.sleep(self._world.random.uniform(0.05, 1.0))
        raise Unanswered(f"{path} was never answered; last: {reply}")


def _json(path: str, body: dict[str, Any]) -> tuple[str, bytes, str]:
    return path, json.dumps(body).encode(), JSON
