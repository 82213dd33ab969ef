"""An agent with a tool in a sandbox, which knows only the `openai` package: `python examples/tool_agent.py --steps 8`.

The model calls `python`, its code runs in a sandbox of the rollout's own, and it reads what came of it. The built-in
model has never seen a tool, so it is shown first how a call is written, but not which code is right: that it finds out
by the reward. The loop that trains it is openai_agent's (docs/rl.md, "Sandboxes").
"""

import json
import random
from typing import Any

import openai
import weft
from openai_agent import main
from weft import rl

SANDBOXES = rl.sandboxes.Local(rl.sandboxes.Limits(memory_bytes=64 << 20, disk_bytes=1 << 20), most=256)
CODE = {"type": "object", "properties": {"code": {"type": "string"}}}
TOOLS: Any = [{"type": "function", "function": {"name": "python", "parameters": CODE}}]
TEST = """
a, b = {a}, {b}
answer = {code}
assert answer == {a} + {b}, f"{{answer}} is wrong."
"""


async def agent(client: openai.AsyncOpenAI, model: str, session: str, a: int, b: int) -> float:
    """Code whose value is right is worth 1, or less for each run that failed before it."""
    messages: list[Any] = [{"role": "user", "content": f"What is {a} + {b}?"}]
    async with rl.sandboxes.opened(SANDBOXES) as box:
        for tries in (1, 2):
            said = await client.chat.completions.create(
                model=model, messages=messages, tools=TOOLS, max_tokens=48, extra_headers={"X-Session-ID": session}
            )
            reply: Any = said.choices[0].message
            if not reply.tool_calls:
                return 0.0
            call = reply.tool_calls[0]
            try:
                code = json.loads(call.function.arguments)["code"]
            except (ValueError, TypeError, KeyError):  # a call, but not as it was shown
                return 0.0
            test = TEST.format(code=code, a=a, b=b)
            done = await box.exec("python3", "-S", "-", stdin=test.encode(errors="replace"))
            if done.returncode == 0:
                return 1 / tries
            seen = (done.text.splitlines() or [f"It passed its limit of {done.limit}."])[-1]
            result = {"role": "tool", "tool_call_id": call.id, "content": seen}
            messages += [reply.model_dump(exclude_none=True), result]
    return 0.0


def lesson(run: weft.TrainingClient) -> None:
    """How a call is written, with code that is right as often as chance has it."""
    rng, talks = random.Random(1), list[list[dict[str, Any]]]()
    for _ in range(360):
        code = f"a {rng.choice('+-*/')} b"
        call = {"type": "function", "function": {"name": "python", "arguments": {"code": code}}}
        asked = f"What is {rng.randint(1, 9)} + {rng.randint(1, 9)}?"
        talks.append([{"role": "user", "content": asked}, {"role": "assistant", "content": "", "tool_calls": [call]}])
    data = rl.conversations(talks, run.get_tokenizer(), tools=TOOLS)
    rl.sft(run, data, batch=6, learning_rate=rl.linear(1e-2, 60), sinks=[])


if __name__ == "__main__":
    main(agent, __doc__, lesson, rate=1e-3)
