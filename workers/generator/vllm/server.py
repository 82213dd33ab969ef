"""One `vllm serve`, kept available: started as a child and restarted when it dies, or awaited at a URL.

It counts as ready once it has answered requests of every kind, logprobs too: the first of a kind may compile for half a
minute. `lives` counts how often it became ready; a restart loses its adapters. Lives in one event loop.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from workers.generator.vllm.adapters import LoraLimits
from workers.generator.vllm.client import VllmClient, VllmLost, VllmRefused
from workers.model.planning.vllm_options import Layout, mixing_connector, other_numbers, words as option_words

log = logging.getLogger(__name__)

#: The name of the base model in vLLM.
BASE = "base"
#: After this many failed starts in a row the failure is taken as permanent.
START_ATTEMPTS = 3
#: Seconds that a start may take, which includes reading the model and, on a GPU, capturing graphs.
START_S = 900.0
_POLL_S = 0.25
_WATCH_S = 2.0


class VllmFailed(RuntimeError):
    """vLLM does not come up; the message is one line for the operator."""


def reserve(slots: int) -> int:
    """How many sequences vLLM may have beyond its slots: of whoever has none while all are taken (`Engine.yields`)."""
    return max(1, slots // 8)


@dataclass(frozen=True)
class Launch:
    """How to start it. `program` is the `vllm` command of an environment that `make vllm` made, or of a GPU machine's
    with Weft's plugin (deploy/vllm/plugin); `context` the longest sequence, `slots` the sequences in one batch, beside
    a `reserve`.
    `options` are further options of vLLM (`workers.model.planning.vllm_options`). `gpus`: the numbers of the GPUs that
    it may see."""

    program: Path
    model: Path
    targets: Sequence[str]
    context: int
    slots: int
    limits: LoraLimits
    dtype: str = "float32"
    threads: int = 1
    kv_bytes: int = 1 << 30
    cpu: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)
    gpus: Sequence[int] = ()

    def command(self, socket: Path) -> list[str]:
        limits, adapters = self.limits, self.limits.max_adapters
        words = [str(self.program), "serve", str(self.model), "--served-model-name", BASE, "--uds", str(socket)]
        # One more than the context: the last token of a sequence is not fed back.
        most = str(self.slots + reserve(self.slots))
        words += ["--dtype", self.dtype, "--max-model-len", str(self.context + 1), "--max-num-seqs", most]
        words += ["--max-logprobs", "-1", "--generation-config", "vllm"]
        words += ["--enable-prompt-tokens-details", "--enable-scale-out", "--disable-log-stats"]
        words += [
            "--disable-uvicorn-access-log",
            "--skip-tokenizer-init",
            "--worker-extension-cls",
            "weft_vllm.worker.Swap",
        ]
        words += ["--enable-lora", "--max-loras", str(adapters), "--max-cpu-loras", str(2 * adapters)]
        words += ["--max-lora-rank", str(limits.max_rank), "--lora-target-modules", *self.targets]
        words += option_words(self.options)
        if Layout.of(self.options).data > 1:  # a single front: with several, adapters could not be loaded while it runs
            words += ["--api-server-count", "1"]
        return words + (["--enforce-eager"] if self.cpu else [])

    def environment(self, place: Path) -> dict[str, str]:
        """The environment of the vLLM process. Temporary files are in `place`, except for compiled code, which the next
        vLLM can use."""
        folder = self.program.parent
        found = {**os.environ, "PATH": f"{folder}:{os.environ.get('PATH', '')}", "HF_HUB_OFFLINE": "1"}
        found.pop("PYTHONPATH", None)  # it names packages of this environment, not of vLLM's
        found |= {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
        found["TMPDIR"] = str(place)
        found.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor_{os.getuid()}")
        found |= {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
        found |= {"VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING")}
        if self.cpu:
            openmp = folder.parent / "lib" / "libiomp5.so"
            found |= {"LD_PRELOAD": str(openmp)} if openmp.is_file() else {}
            found |= {"VLLM_CPU_KVCACHE_SPACE": str(max(1, self.kv_bytes >> 30))}
            found |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(self.threads)}
        elif self.gpus:
            visible = list(filter(None, os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")))
            found |= {"CUDA_VISIBLE_DEVICES": ",".join(visible[gpu] if visible else str(gpu) for gpu in self.gpus)}
        return found


class VllmServer:
    """With `launch`, a child that listens on a socket of its own; without, whatever answers at `url`. `place` is a
    temporary folder, also for everything that vLLM leaves in temporary folders (the path of a UNIX socket may have
    about a hundred bytes, which a data folder's may exceed). `rounds`: why its numbers differ from the trainer's with
    any options."""

    def __init__(self, place: Path, launch: Launch | None = None, url: str = "", rounds: str = "") -> None:
        self._launch, self._place = launch, place
        self._socket = place / "http.sock"
        self.url = url or f"unix:{self._socket}"
        self.client = VllmClient(self.url)
        self.ready = asyncio.Event()
        self.lives = 0
        self.base = BASE
        self.longest = sys.maxsize  # the longest sequence that it takes, in tokens, prompt included
        self.swaps = self.tempered = False  # its plugin replaces weights in place; computes logprobs at the temperature
        self._always_rounds = rounds
        self.rounds = ""  # why its numbers differ from the trainer's (its options, for example), for people
        self.failure: VllmFailed | None = None
        self._lost = asyncio.Event()

    async def close(self) -> None:
        await self.client.close()

    def lost(self) -> None:
        """Call when a request finds that the server does not answer."""
        self.ready.clear()
        self._lost.set()

    async def keep(self) -> None:
        """Keep vLLM running until cancelled, or until `failure` is set."""
        attempts = 0
        while self.failure is None and (attempts < START_ATTEMPTS or self._launch is None):
            process = await self._spawn() if self._launch is not None else None
            try:
                if await self._came_up(process):
                    attempts = 0
                    self.lives += 1
                    self.ready.set()
                    await self._until_gone(process)
                    log.warning("vLLM is gone; %s", "it is started again" if process else "waiting for it")
                else:
                    attempts += 1
            finally:
                self.ready.clear()
                await _kill(process)
            await asyncio.sleep(min(5.0, 0.1 * 2**attempts))
        self.failure = self.failure or VllmFailed(f"vLLM did not come up in {attempts} starts; its log says why")

    async def _spawn(self) -> asyncio.subprocess.Process:
        assert self._launch is not None
        self._socket.unlink(missing_ok=True)
        guard = [sys.executable, str(Path(__file__).with_name("guard.py")), *self._launch.command(self._socket)]
        return await asyncio.create_subprocess_exec(
            *guard,
            stdin=asyncio.subprocess.PIPE,
            stdout=sys.stderr.fileno(),
            env=self._launch.environment(self._place),
            start_new_session=True,
        )

    async def _came_up(self, process: asyncio.subprocess.Process | None) -> bool:
        self._lost.clear()
        began = time.monotonic()
        while not await self.client.healthy():
            if time.monotonic() - began > START_S:
                log.error("vLLM was not ready after %d s", START_S)
                return False
            if process is not None and process.returncode is not None:
                return False
            await asyncio.sleep(_POLL_S if process is not None else _WATCH_S)
        try:
            about = await self.client.about()
            models = await self.client.models()
            self.base = BASE if BASE in models else next(iter(models))
            self.longest = models[self.base] or self.longest
            options = self._launch.options if self._launch is not None else await self.client.options()
            if mixing := mixing_connector(options):
                why = "organisations and adapters may get each other's keys and values there; see docs/vllm.md"
                self.failure = VllmFailed(
                    f"vLLM at {self.url} has kv_transfer_config with kv_connector {mixing}: {why}"
                )
                return False
            self.rounds = ", ".join(filter(None, (other_numbers(options), self._always_rounds)))
            self.swaps = bool(about)
            # Speculated tokens are scored outside of the sampler that the plugin knows.
            self.tempered = bool(about.get("tempered_logprobs")) and "speculative_config" not in options
            await self._warm_up()
        except (VllmLost, VllmRefused) as error:
            log.error("vLLM does not generate: %s", error)
            return False
        log.info("vLLM is ready after %.1f s: %s", time.monotonic() - began, about or "without Weft's plugin")
        return True

    async def _warm_up(self) -> None:
        """A request of every kind, alone and together."""
        kinds: list[dict[str, Any]] = [{}, {"temperature": 0.0}, {"prompt_logprobs": 1}]
        kinds += [{"logprobs": 2, "top_k": 3, "seed": 1, "temperature": 0.5}, {"top_p": 0.5, "seed": 2}]
        bodies = [
            {
                "model": self.base,
                "request_id": f"warm-up-{i}",
                "token_ids": [1, 2, 3],
                "sampling_params": dict[str, Any](max_tokens=3, logprobs=0, detokenize=False) | kind,
            }
            for i, kind in enumerate(kinds)
        ]
        for body in bodies:
            await self.client.generate(body)
        await asyncio.gather(*(self.client.generate(body) for body in bodies))

    async def _until_gone(self, process: asyncio.subprocess.Process | None) -> None:
        while not self._lost.is_set():
            waits: list[asyncio.Task[Any]] = [asyncio.create_task(self._lost.wait())]
            waits += [asyncio.create_task(process.wait())] if process is not None else []
            done, pending = await asyncio.wait(waits, timeout=_WATCH_S, return_when=asyncio.FIRST_COMPLETED)
            for wait in pending:
                wait.cancel()
            if done or not await self.client.healthy():
                return


async def _kill(process: asyncio.subprocess.Process | None) -> None:
    """Close the guard's pipe: it then kills itself and all processes of vLLM."""
    if process is None or process.stdin is None:
        return
    process.stdin.close()
    with suppress(ProcessLookupError):
        await process.wait()
