"""Scripted model for tests of conversations."""

import asyncio
from array import array
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from tests.orchestrator.episodes.chat_templates import ENDS, add_chat_template, stop_tokens
from tidegate.orchestrator.core.rollout import Rollout, Turn
from tidegate.orchestrator.episodes.episode import Episode
from tidegate.orchestrator.episodes.model_files import ModelFiles, read_tokenizer
from tidegate.orchestrator.fleet.pending_futures import PendingFutures
from tidegate.orchestrator.settings.config import SamplingSettings
from tidegate.transport.media import Media
from tidegate.transport.messages import SamplingParams

DEFAULTS = SamplingSettings(max_tokens=400, temperature=1.0, seed=7)
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
]
CALL = '<tool_call>\n{"name": "add",   "arguments": {"a": 1, "b": [2]}}\n</tool_call>'


@dataclass
class Engine:
    """Generates given texts, and records what it read and wrote."""

    model: ModelFiles
    end: str
    words: list[str] = field(default_factory=list)
    """Texts to generate next; one without an end mark is cut off by its length."""
    received: list[tuple[int, list[int], list[int]]] = field(default_factory=list)
    """(row, context, output) of each turn."""
    rollouts: int = 1
    context_tokens: int = 0
    """Longest context that it reads; 0 if unknown."""
    newer_weights: asyncio.Event | None = None
    """Set when newer weights are live; an episode over its budget waits for it."""
    pending: PendingFutures = field(default_factory=PendingFutures)
    """Has the events of streams that are subscribed to rollouts."""

    async def generate(
        self, rollout: Rollout, sampling: SamplingParams, media: tuple[Media, ...] = ()
    ) -> Turn:
        words = self.words.pop(0)
        ids = self.model.tokenizer.encode(words, add_special_tokens=False).ids
        self.received.append((rollout.rollout_id, rollout.token_ids.tolist(), ids))
        turn = Turn(rollout, sampling, media)
        rollout.turns.append(turn)
        for token in ids:
            turn.append(token, -1.0, 0, "engine-0")
        has_stop_string = any(words.endswith(stop) for stop in sampling.stop_strings)
        stops = {*self.model.stop_token_ids, *sampling.stop_token_ids}
        is_stopped = has_stop_string or ids[-1] in stops
        turn.finish_reason = "stop" if is_stopped else "length"
        return turn

    async def rejoin(self, rollout: Rollout) -> Turn:
        raise AssertionError("nothing is resumed here")

    def subscribe(
        self, rollout: Rollout, event: asyncio.Event, turn: "asyncio.Future[Any]"
    ) -> None:
        self.pending.subscribe(rollout.rollout_id, event, turn)

    def give_up_turn(self, rollout: Rollout) -> None:
        raise AssertionError("no test cancels a call here")

    def cut(self, rollout: Rollout, *, turns: int, tokens: int) -> None:
        raise AssertionError("nothing is resumed here")

    def activity(self, rollout: Rollout, name: str) -> AbstractContextManager[None]:
        return nullcontext()

    def context_tokens_max(self) -> int:
        return self.context_tokens

    def is_over_budget(self, rollout: Rollout) -> bool:
        return self.newer_weights is not None

    async def park(self, rollout: Rollout) -> None:
        assert self.newer_weights is not None
        await self.newer_weights.wait()

    async def score(self, rollout: Rollout, asked: object) -> NoReturn:
        raise AssertionError("no test requests scores here")

    def fork(self, rollout: Rollout, reason: str) -> Rollout:
        branch = Rollout(self.rollouts, 0, 0)
        self.rollouts += 1
        branch.branch_of, branch.fork_reason = rollout, reason
        rollout.branches = (*rollout.branches, branch)
        return branch


class Talk:
    """An episode with a scripted model."""

    def __init__(self, directory: Path, template: str) -> None:
        path = directory / template
        if not path.exists():
            add_chat_template(path, template)
        tokenizer = read_tokenizer(path / "tokenizer.json")
        self.model = ModelFiles(path, tokenizer, tuple(stop_tokens(tokenizer, template)))
        self.engine = Engine(self.model, ENDS[template])
        self.rollout = Rollout(0, 0, 0)
        self.episode = Episode(self.rollout, self.model, self.engine, DEFAULTS)

    async def say(self, words: str, messages: list[dict[str, Any]], **options: Any) -> Any:
        """Have the model generate ``words`` next."""
        self.engine.words.append(words)
        turn = await self.episode.generate(messages=messages, **options)
        return turn.message

    def text(self, row: Rollout) -> str:
        return str(self.model.tokenizer.decode(row.token_ids.tolist(), skip_special_tokens=False))

    def check(self) -> None:
        """Check that rows are what the engine read and wrote, and loss masks what it wrote."""
        rows = list(self.rollout.rows)
        for row in rows:
            turns = [(context, out) for number, context, out in self.engine.received
                     if number == row.rollout_id]  # fmt: skip
            assert len(turns) == len(row.turns)
            sampled: set[int] = set()
            for turn, (context, out) in zip(row.turns, turns, strict=True):
                assert row.token_ids[: turn.start] == array("i", context)
                assert turn.token_ids == array("i", out)
                sampled |= set(range(turn.start, turn.start + turn.length))
            assert {n for n, p in enumerate(row.logprobs) if p} == sampled
        written = sum(len(out) for _, _, out in self.engine.received)
        assert sum(row.sampled_tokens for row in rows) == written  # each trained once


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def tool(content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "x", "content": content}
