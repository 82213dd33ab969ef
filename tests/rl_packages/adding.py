"""Tasks for verifiers 0.4, and a tool server that it starts as `python -m tests.rl_packages.adding`."""

from __future__ import annotations

import verifiers.v1 as vf

# mypy: disable-error-code="untyped-decorator"


class Sum(vf.TaskData):
    answer: str = ""


class Adding(vf.Task[Sum]):
    @vf.reward
    async def exact(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.strip() == self.data.answer)


class Adder(vf.Toolset[vf.ToolsetConfig]):
    TOOL_PREFIX = None

    @vf.tool
    def add(self, a: int, b: int) -> int:
        """Add two numbers."""
        return a + b


class AddingByTool(Adding):
    @vf.reward(weight=0.5)
    async def called(self, trace: vf.Trace) -> float:
        return float(bool(trace.tool_messages))

    @classmethod
    def toolsets(cls, config: vf.TaskConfig) -> list[vf.Toolset]:
        return [Adder(vf.ToolsetConfig())]


if __name__ == "__main__":
    Adder.run()
