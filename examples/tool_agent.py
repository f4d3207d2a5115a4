"""How is an agent with tools trained? Short sums in messages, the calculator in a process.

    agent = await ToolAgent.with_tools(pool)
    async for batch in rollouts.batches(tasks("train", seed=0), episode=agent):
        …

It is what one would write for OpenAI's API: messages in, a message out, tool calls answered by
messages. It knows nothing of tokens or weights. Tasks and grader are the calculator example's.
"""

import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import tidegate
from examples.calculator import Task, grade
from tidegate.environments.tools import ToolAnswer

TURNS_MAX = 4
"""Two calls and an answer solve every task; one turn is left for a mistake."""
TURN_TOKENS_MAX = 16
"""A call such as 18-9 takes 11 with its end; the rest is slack."""
ANSWER_CHARACTERS_MAX = 80
"""Of a tool's: an error says enough in a line."""


@dataclass(slots=True)
class ToolCounts:
    """What became of the calls."""

    made: int = 0
    failed: int = 0


@dataclass(frozen=True, slots=True)
class ToolAgent:
    """An episode function."""

    use_tool: Callable[[str, Any], Awaitable[ToolAnswer]]
    """By its name and arguments."""
    schemas: list[dict[str, Any]]
    """Of the tools, in OpenAI's form."""
    counts: ToolCounts = field(default_factory=ToolCounts)

    @classmethod
    async def with_tools(cls, pool: tidegate.EnvironmentPool) -> "ToolAgent":
        """One whose calculator runs in the pool's processes."""
        tools = tidegate.Tools(pool, {"calculate": "examples.agent_tools:calculate"})
        return cls(tools.answer, await tools.describe())

    async def __call__(self, episode: tidegate.Episode, task: Task) -> float:
        """Play one episode; 1.0 for a right answer, 0.0 for a wrong one or none in four turns."""
        messages: list[dict[str, Any]] = [{"role": "user", "content": task.question}]
        for _ in range(TURNS_MAX):
            turn = await episode.generate(
                messages=messages, tools=self.schemas, max_tokens=TURN_TOKENS_MAX
            )
            assert turn.message is not None
            messages.append(turn.message)
            calls = turn.message.get("tool_calls", ())
            if not calls:
                return grade(turn.message["content"], task)
            messages += [await self._answer(call) for call in calls]
        return 0.0

    async def _answer(self, call: dict[str, Any]) -> dict[str, Any]:
        function = call["function"]
        answer = await self.use_tool(function["name"], json.loads(function["arguments"]))
        self.counts.made += 1
        self.counts.failed += answer.is_error
        content = answer.text[:ANSWER_CHARACTERS_MAX]
        return {"role": "tool", "tool_call_id": call["id"], "content": content}
