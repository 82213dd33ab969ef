"""Unmodified verifiers 0.4 against the server of WEFT_BASE_URL: its agent, its harness and its own TrainClient, which
uses vLLM's API and knows nothing of us. Each rollout is trained by the session that it named. Prints one line of JSON:
a list of steps."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
import sys
import tempfile
from typing import Any

import verifiers.v1 as vf
import weft
from renderers import Qwen3RendererConfig
from verifiers.v1.clients import TrainClientConfig
from verifiers.v1.harnesses.null import NullHarnessConfig
from verifiers.v1.runtimes.subprocess import SubprocessRuntime
from weft import rl
from weft.rl.rollout import join

from tests.rl_packages.adding import Adding, AddingByTool, Sum
from tests.rl_packages.lesson import taught

STEPS, TASKS, SIZE = 2, 2, 4
#: The function `add` as a toolset shows it to the model.
NUMBERS = {name: {"title": name.upper(), "type": "integer"} for name in "ab"}
PARAMETERS = {"type": "object", "properties": NUMBERS, "required": ["a", "b"], "title": "addArguments"}
ADD = {"name": "add", "description": "Add two numbers.", "parameters": PARAMETERS}


async def prepare(self: Any, script: str | bytes, env: Any = None, *, activate: bool = True) -> list[str]:
    """Replaces verifiers' own, which has `uv` fetch the program's imports: all of them are installed already."""
    data = script.encode() if isinstance(script, str) else script
    path = f"{self.scripts_dir}/{hashlib.sha256(data).hexdigest()}.py"
    await self.write(path, data)
    return [sys.executable, path]


def config(run_id: str, tokenizer: str) -> vf.AgentConfig:
    client = TrainClientConfig(
        base_url=f"{os.environ['WEFT_BASE_URL']}/v1",
        api_key_var="WEFT_API_KEY",
        renderer=Qwen3RendererConfig(thinking_retention="all"),  # so that turns extend each other
        renderer_model_name=tokenizer,
    )
    return vf.AgentConfig(
        harness=NullHarnessConfig(id="null"),
        runtime=vf.SubprocessConfig(),
        model=f"run:{run_id}",
        client=client,
        sampling=vf.SamplingConfig(max_tokens=40, temperature=1.0),
        max_turns=2,
    )


async def rollout(agent: vf.Agent, kind: str, a: int, b: int) -> vf.Trace:
    made = AddingByTool if kind == "tool" else Adding
    task = made(Sum(prompt=f"What is {a} + {b}?", answer=str(a + b)))
    if kind != "multi":
        return await agent.run(task)
    async with agent.interaction(task) as talk:
        await talk.turn()
        await talk.turn(f"Again: what is {a} + {b}?")
    return talk.trace


def same(trace: vf.Trace, rollout: rl.Rollout) -> bool:
    """Whether the session has exactly the tokens and the bits of the log-probabilities that the client got."""
    kept = [(joined.tokens, joined.drawn, joined.logprobs) for joined in join(rollout.turns)]
    return kept == [(branch.token_ids, branch.sampled_mask, branch.logprobs) for branch in trace.branches]


async def go(kind: str) -> list[dict[str, float]]:
    service, rng, steps = weft.ServiceClient(), random.Random(0), []
    run = await service.create_lora_training_client_async("weft/tiny-moe", rank=8, seed=0)
    tokenizer = await asyncio.to_thread(run.get_tokenizer)
    loss = rl.losses.importance_sampling()
    if kind == "tool":
        await asyncio.to_thread(taught, run, ADD)
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        async with vf.Agent(config(run.model_id, folder)) as agent:
            for _ in range(STEPS):
                await run.save_weights_and_get_sampling_client_async()
                asked = [(rng.randint(1, 9), rng.randint(1, 9)) for _ in range(TASKS)]
                traces = await asyncio.gather(*(rollout(agent, kind, *task) for task in asked for _ in range(SIZE)))
                failed = [trace for trace in traces if not trace.ok or not trace.num_turns]
                if failed:
                    raise RuntimeError(f"{failed[0].stop_condition}: {failed[0].errors}, {failed[0].calls}")
                got = [await rl.trajectories_async(trace.id, service, trace.reward) for trace in traces]
                # Every rollout is trained: the test looks at whether it is on-policy, not at whether the model learns.
                data = [datum for one in got for datum in rl.data_of(one, one.reward - 0.1)]
                backward = loss.forward_backward(run, [loss.datum(datum, 1 / len(data)) for datum in data], None)
                await run.optim_step_async(weft.AdamParams(learning_rate=1e-3))
                numbers = {name.split(":")[0]: value for name, value in (await backward).metrics.items()}
                turns = sum(len(one.turns) for one in got)
                calls = sum(len(trace.tool_messages) for trace in traces)
                checked = all(map(same, traces, got))
                numbers |= {"rollouts": len(got), "data": len(data), "turns": turns, "calls": calls, "same": checked}
                steps.append(numbers)
    await service.close()
    return steps


if __name__ == "__main__":
    SubprocessRuntime.prepare_uv_script = prepare
    print(json.dumps(asyncio.run(go(sys.argv[1]))))
