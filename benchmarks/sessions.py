"""Prefill saved by keeping sessions' KV while agents wait for tools, in a cache that is too small.

The engine's real scheduler runs without a model, in virtual time: a step takes what the published
model of a rollout engine says (8 ms, 0.12 ms a row, 25,000 prompt tokens a second), and a tool call
takes a log-normal time with a long tail. The trajectories in flight are a multiple of the decode
slots, and the cache holds a share of their context. :mod:`benchmarks.agents` prints the rows.

``saved_share`` is the share of reusable context tokens whose KV was found: with an infinite cache
every turn computes only what is new since the last, and a group's prompt once.
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from benchmarks.table import Row, compared
from tidegate.engine.execution.runner import StepOutput
from tidegate.engine.scheduling.scheduler import EngineScheduler
from tidegate.engine.scheduling.sequences import EngineLimits
from tidegate.transport.messages import SamplingParams, SubmitTurn

VOCAB = 32_000
BLOCK_TOKENS = 16
STEP_S, ROW_S, PREFILL_S = 0.008, 0.00012, 1 / 25_000
"""Seconds of a step, of a row in it, and of a prefilled token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Agents:
    """Workload of an engine; means of geometric draws, in tokens."""

    slots: int = 16
    trajectories_per_slot: float = 3.0
    groups: int = 24
    group_size: int = 8
    prompt_tokens: int = 600
    turns: int = 12
    turn_tokens: int = 60
    observation_tokens: int = 60
    tool_median_s: float = 2.5
    tool_sigma: float = 1.0
    cache_share: float = 1.0
    """Cache size over the blocks that all trajectories in flight fill when they are half done."""

    @property
    def trajectories(self) -> int:
        """Number of trajectories in flight at once."""
        return round(self.slots * self.trajectories_per_slot)

    @property
    def limits(self) -> EngineLimits:
        """Limits of the engine."""
        mean_context_tokens = (self.turn_tokens + self.observation_tokens) * self.turns / 2
        tokens = self.trajectories * (mean_context_tokens + self.prompt_tokens / self.group_size)
        return EngineLimits(
            max_running_turns=self.slots,
            max_step_tokens=1024,
            num_blocks=round(self.cache_share * tokens / BLOCK_TOKENS),
            block_tokens=BLOCK_TOKENS,
            context_tokens_max=16_384,
            vocab_size=VOCAB,
        )


@dataclass(slots=True)
class Trajectory:
    """One rollout: its context, and its remaining turns."""

    number: int
    group: int
    context: list[int]
    turns: list[tuple[int, int, float]]
    """(tokens sampled, tokens observed, tool seconds) per turn; the last turn first."""
    known_tokens: int = 0
    """Context tokens whose KV an infinite cache would have."""


@dataclass(slots=True)
class Counted:
    """Counters of a run."""

    requested_tokens: int = 0
    """Context positions of all turns."""
    ideal_tokens: int = 0
    """Context positions that an infinite cache would have."""
    cached_tokens: int = 0
    seconds: float = 0.0
    sampled_tokens: int = 0

    @property
    def saved_share(self) -> float:
        """Prefill saved as a share of what could have been saved."""
        return self.cached_tokens / self.ideal_tokens


@dataclass(slots=True)
class Bench:
    """One engine and its agents."""

    agents: Agents
    has_sessions: bool
    scheduler: EngineScheduler = field(init=False)
    counted: Counted = field(default_factory=Counted)

    def run(self, seed: int) -> Counted:
        """Play all trajectories, with the configured number in flight."""
        self.scheduler = EngineScheduler(self.agents.limits)
        chance = np.random.default_rng(seed)
        todo = list(_trajectories(self.agents, chance))[::-1]
        waiting: list[tuple[float, int, Trajectory]] = []
        running: dict[int, Trajectory] = {}
        in_flight, now_s, handle = 0, 0.0, 0
        prompts: set[int] = set()
        while todo or in_flight:
            while todo and in_flight < self.agents.trajectories:
                fresh = todo.pop()
                heapq.heappush(waiting, (now_s, fresh.number, fresh))
                in_flight += 1
            while waiting and waiting[0][0] <= now_s:
                trajectory = heapq.heappop(waiting)[2]
                handle += 1
                running[handle] = trajectory
                self._submit(handle, trajectory, prompts)
            if not running:
                now_s = waiting[0][0]
                continue
            took_s, ended = self._step(running, chance)
            now_s += took_s
            for trajectory in ended:
                _, observed, tool_s = trajectory.turns.pop()
                if not trajectory.turns:
                    in_flight -= 1
                    self.scheduler.sessions.end([trajectory.number])
                    continue
                trajectory.known_tokens = len(trajectory.context) - 1
                trajectory.context += chance.integers(0, VOCAB, observed).tolist()
                heapq.heappush(waiting, (now_s + tool_s, trajectory.number, trajectory))
        self.scheduler.check()
        self.counted.seconds = now_s
        return self.counted

    def _submit(self, handle: int, trajectory: Trajectory, prompts: set[int]) -> None:
        known = trajectory.known_tokens
        if not known and trajectory.group in prompts:
            known = len(trajectory.context) - 1
        prompts.add(trajectory.group)
        self.counted.requested_tokens += len(trajectory.context)
        self.counted.ideal_tokens += known // BLOCK_TOKENS * BLOCK_TOKENS
        self.scheduler.submit(
            SubmitTurn(
                turn=handle,
                token_ids=np.array(trajectory.context, "<i4").tobytes(),
                sampling=SamplingParams(max_tokens=trajectory.turns[-1][0]),
                priority=trajectory.group,
                session=trajectory.number if self.has_sessions else 0,
            )
        )

    def _step(
        self, running: dict[int, Trajectory], chance: np.random.Generator
    ) -> tuple[float, list[Trajectory]]:
        """Run one step; return its duration and the trajectories whose turns ended."""
        rows = self.scheduler.plan()
        tokens = sum(len(row.token_ids) for row in rows)
        count = sum(row.sampling is not None for row in rows)
        sampled = chance.integers(0, VOCAB, count).astype(np.int32)
        columns = self.scheduler.complete(StepOutput(sampled, np.zeros(count, np.float32)))
        took_s = STEP_S + ROW_S * count + PREFILL_S * (tokens - count)
        ended: list[Trajectory] = []
        if columns is None:
            return took_s, ended
        self.counted.cached_tokens += sum(
            p.cached_tokens for p in columns.prefills if not p.output_tokens
        )
        self.counted.sampled_tokens += count
        handles = np.frombuffer(columns.turns, "<u4").tolist()
        finish = columns.finish or bytes(count)
        for handle, token, code in zip(handles, sampled.tolist(), finish, strict=True):
            running[handle].context.append(token)
            if code:
                ended.append(running.pop(handle))
        return took_s, ended


def _trajectories(agents: Agents, chance: np.random.Generator) -> Iterator[Trajectory]:
    for number in range(agents.groups * agents.group_size):
        group, place = divmod(number, agents.group_size)
        if not place:
            prompt = chance.integers(0, VOCAB, agents.prompt_tokens).tolist()
        turns = [
            (
                int(chance.geometric(1 / agents.turn_tokens)),
                int(chance.geometric(1 / agents.observation_tokens)),
                agents.tool_median_s * float(chance.lognormal(0.0, agents.tool_sigma)),
            )
            for _ in range(agents.turns)
        ]
        yield Trajectory(number + 1, group, list(prompt), turns)


def rows() -> list[Row]:
    """Compare caches that hold all half-done trajectories, and less, with and without sessions."""
    lines: list[Row] = []
    for share in (1.0, 0.8):
        agents = Agents(cache_share=share)
        plain, kept = (Bench(agents, has_sessions=says).run(0) for says in (False, True))
        name = f"prefill_saved_share_cache_{share:.1f}"
        lines.append(compared(name, "", kept.saved_share, plain.saved_share))
    return lines
