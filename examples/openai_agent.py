"""An agent that knows only the `openai` package, trained by what it said: `python examples/openai_agent.py --steps 20`.

Its requests name the run as their model and carry a session id, so the server has the exact tokens of each
conversation; the loop below makes data of them, and takes a step (docs/openai.md, docs/rl.md).
"""

import argparse
import asyncio
import itertools
import os
import random
from collections.abc import Awaitable, Callable
from typing import Any

import openai
import weft
from weft import rl

#: An agent's client, the model it is to name, its session (SOMETHING-SEED), and the task; its reward comes back.
Agent = Callable[[openai.AsyncOpenAI, str, str, int, int], Awaitable[float]]
#: What a run is to know before its agent begins.
Lesson = Callable[[weft.TrainingClient], None]


async def agent(client: openai.AsyncOpenAI, model: str, session: str, a: int, b: int) -> float:
    """Any program that talks to OpenAI's API could stand here. Returns its reward."""
    messages: list[Any] = [{"role": "user", "content": f"What is {a} + {b}?"}]
    seed, headers = int(session.rpartition("-")[2]), {"X-Session-ID": session}
    for tries in (1, 2):
        said = await client.chat.completions.create(
            model=model, messages=messages, max_tokens=4, seed=seed, extra_headers=headers
        )
        answer = (said.choices[0].message.content or "").strip()
        if answer == str(a + b):
            return 1 / tries
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": f"No. What is {a} + {b}?"}]
    return 0.0


async def train(agent: Agent, lesson: Lesson | None, rate: float, steps: int, batch: int, size: int) -> None:
    service, rng, numbers = weft.ServiceClient(), random.Random(0), itertools.count()
    run = await service.create_lora_training_client_async("weft/tiny-moe", rank=16, seed=0)
    if lesson is not None:
        await asyncio.to_thread(lesson, run)
    loss, model = rl.losses.importance_sampling(), f"run:{run.model_id}"
    async with openai.AsyncOpenAI(
        base_url=f"{os.environ['WEFT_BASE_URL']}/v1", api_key=os.environ["WEFT_API_KEY"]
    ) as client:

        async def rollout(a: int, b: int) -> rl.Rollout:
            session = f"{run.model_id}-{next(numbers)}"
            reward = await agent(client, model, session, a, b)
            return await rl.trajectories_async(session, service, reward)

        for step in range(steps):
            await run.save_weights_and_get_sampling_client_async()  # what `run:` means from here on
            tasks = [(rng.randint(1, 9), rng.randint(1, 9)) for _ in range(batch)]
            groups = await asyncio.gather(*(asyncio.gather(*(rollout(*task) for _ in range(size))) for task in tasks))
            graded = [
                pair for group in groups for pair in zip(group, rl.dr_grpo([one.reward for one in group]), strict=True)
            ]
            data = [datum for one, advantage in graded if advantage for datum in rl.data_of(one, advantage)]
            if data:
                drawn = sum(one.sampled for one, _ in graded)
                backward = loss.forward_backward(run, [loss.datum(datum, 1 / drawn) for datum in data], None)
                await run.optim_step_async(weft.AdamParams(learning_rate=rate))
                await backward
            print("reward", step, round(sum(one.reward for one, _ in graded) / len(graded), 3), flush=True)
    await service.close()


def main(agent: Agent, about: str | None, lesson: Lesson | None = None, rate: float = 2e-3) -> None:
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("steps", 20), ("batch", 12), ("size", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    asyncio.run(train(agent, lesson, rate, **vars(parser.parse_args())))


if __name__ == "__main__":
    main(agent, __doc__)
