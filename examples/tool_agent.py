"""Agent with a tool: solves short sums in a chat, with the calculator in a worker process.

    agent = await ToolAgent.with_tools(pool)
    async for batch in rollouts.batches(tasks("train", seed=0), episode=agent):
        …

It is written as for OpenAI's API: messages in, a message out, tool calls answered by messages.
Tasks and grader are those of the calculator example.
"""

import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import tidegate
from examples.calculator import Task, grade
from tidegate.environments.tools import ToolAnswer

TURNS_MAX = 4
"""Turn limit: two calls and an answer solve every task, and one turn is left for a mistake."""
TURN_TOKENS_MAX = 16
"""Token limit of a turn. A call such as 18-9 takes 11 with its end; the rest is slack."""
ANSWER_CHARACTERS_MAX = 80
"""Maximum length of a tool's answer; an error message fits in one line."""


@dataclass(slots=True)
class ToolCounts:
    """Counters of tool calls."""

    made: int = 0
    failed: int = 0


@dataclass(frozen=True, slots=True)
class ToolAgent:
    """Episode function of the agent."""

    use_tool: Callable[[str, Any], Awaitable[ToolAnswer]]
    """Calls a tool by its name and arguments."""
    schemas: list[dict[str, Any]]
    """The tools' schemas, in OpenAI's format."""
    counts: ToolCounts = field(default_factory=ToolCounts)

    @classmethod
    async def with_tools(cls, pool: tidegate.EnvironmentPool) -> "ToolAgent":
        """Create an agent whose calculator runs in the pool's processes."""
        tools = tidegate.Tools(pool, {"calculate": "examples.agent_tools:calculate"})
        return cls(tools.answer, await tools.describe())

    async def __call__(self, episode: tidegate.Episode, task: Task) -> float:
        """Play one episode; return 1.0 for a right answer, 0.0 for a wrong one or none in four
        turns."""
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
