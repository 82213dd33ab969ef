"""A function of Lua that Redis keeps: it is made once, where a script's functions are made anew with every call, which
costs more than most of the calls of `fair_queue.lua` themselves."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import redis

from scheduler.links.redis_clients import Client


class Library:
    """`source` registers one function, under the name that is in its LIBRARY; that is of this source alone, so any
    number of versions may share one Redis. A Redis that has lost everything, or that nobody has given it yet, is given
    it with the first call."""

    def __init__(self, client: Client, source: str) -> None:
        self._client = client
        self._name = f"weft_{hashlib.sha256(source.encode()).hexdigest()[:24]}"
        self._source = f'#!lua name={self._name}\nlocal LIBRARY = "{self._name}"\n{source}'

    def __call__(self, keys: Sequence[Any], args: Sequence[Any]) -> Any:
        try:
            return self._call(keys, args)
        except redis.ResponseError as error:
            if "Function not found" not in str(error):
                raise
        self._load()
        return self._call(keys, args)

    def _call(self, keys: Sequence[Any], args: Sequence[Any]) -> Any:
        return self._client.execute_command("FCALL", self._name, len(keys), *keys, *args)  # type: ignore[no-untyped-call]

    def _load(self) -> None:
        try:
            self._client.function_load(self._source)
        except redis.ResponseError as error:  # another process was first
            if "already exists" not in str(error):
                raise
