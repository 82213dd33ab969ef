"""An agent with a tool in a sandbox, which knows only the `openai` package: `python examples/tool_agent.py --steps 20`.

The model writes code, which is run against a test, in a sandbox of the rollout's own; what the run says is what the
model reads next. The loop that trains it is openai_agent's (docs/rl.md, "Sandboxes").
"""

from typing import Any

import openai
from openai_agent import main
from weft import rl

SANDBOXES = rl.sandboxes.Local(rl.sandboxes.Limits(memory_bytes=64 << 20, disk_bytes=1 << 20), most=256)
TEST = """
answer = {code}
assert answer == {a} + {b}, f"{{answer!r}} is wrong."
"""


async def agent(client: openai.AsyncOpenAI, model: str, session: str, a: int, b: int) -> float:
    """A right answer is worth 1, or less for each run that failed before it."""
    question = f"What is {a} + {b}?"
    messages: list[Any] = [{"role": "user", "content": question}]
    async with rl.sandboxes.opened(SANDBOXES) as box:
        for tries in (1, 2):
            said = await client.chat.completions.create(
                model=model, messages=messages, max_tokens=4, extra_headers={"X-Session-ID": session}
            )
            code = said.choices[0].message.content or ""
            done = await box.exec("python3", "-S", "-", stdin=TEST.format(code=code, a=a, b=b).encode())
            if done.returncode == 0:
                return 1 / tries
            seen = (done.text.splitlines() or [f"It passed its limit of {done.limit}."])[-1]
            messages += [{"role": "assistant", "content": code}, {"role": "user", "content": f"{seen} {question}"}]
    return 0.0


if __name__ == "__main__":
    main(agent, __doc__)
