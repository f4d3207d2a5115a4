"""Prefill saved by prefix caching, and the CPU cost of its bookkeeping.

``python -m benchmarks.prefixes [--json]`` prints ``name, value, unit, peer, ratio``. The engine's
real scheduler runs without a model on randomly drawn tokens, so only scheduling is measured. The
peer is the same scheduler without prefix caching. A command that no module imports. Built on the
engine's scheduler.

``demo``: groups of 8 that answer in turns of a few tokens, as the example's calculator does.
``agents``: long prompts, and three turns with tool output in between. Weights are swapped from time
to time, and all KV is recomputed. ``us_per_token``: CPU time per token to plan and complete a step,
with 128 decoding turns; the median of several alternating runs.
"""

import argparse
import statistics
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from time import process_time

import numpy as np

from benchmarks.table import Row, compared, show
from tidegate.engine.execution.runner import Row as EngineRow
from tidegate.engine.execution.runner import StepOutput
from tidegate.engine.scheduling.scheduler import EngineScheduler
from tidegate.engine.scheduling.sequences import EngineLimits
from tidegate.transport.messages import FinishWeightUpdate, SamplingParams, SubmitTurn

VOCAB = 32_000
GROUP_SIZE = 8
DECODING_TURNS = 128
DECODED_TOKENS = 400
RUNS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Workload of an engine; means of geometric draws, in tokens."""

    groups: int
    prompt_tokens: int
    turns: int
    turn_tokens: int
    tokens_per_observation: int
    steps_per_swap: int
    limits: EngineLimits


def _limits(running: int, blocks: int) -> EngineLimits:
    return EngineLimits(
        max_running_turns=running,
        max_step_tokens=1024,
        num_blocks=blocks,
        block_tokens=16,
        context_tokens_max=16_384,
        vocab_size=VOCAB,
    )


WORKLOADS = {
    "demo": Workload(
        groups=64,
        prompt_tokens=24,
        turns=3,
        turn_tokens=5,
        tokens_per_observation=4,
        steps_per_swap=60,
        limits=_limits(16, 512),
    ),
    "agents": Workload(
        groups=32,
        prompt_tokens=600,
        turns=3,
        turn_tokens=100,
        tokens_per_observation=50,
        steps_per_swap=500,
        limits=_limits(64, 8192),
    ),
}


class Session:
    """One rollout: its context and its remaining turns."""

    def __init__(self, prompt: list[int], turns: int) -> None:
        self.context = prompt
        self.turns_left = turns


class Engine:
    """A scheduler with random tokens in place of a model."""

    def __init__(self, limits: EngineLimits, *, shares_prefixes: bool) -> None:
        self.scheduler = EngineScheduler(limits, shares_prefixes=shares_prefixes)
        self.prefilled_tokens = 0
        self.sampled_tokens = 0
        self._chance = np.random.default_rng(0)
        self._handles = 0

    def submit(self, context: list[int], max_tokens: int) -> int:
        """Queue a turn; return its handle."""
        self._handles += 1
        self.scheduler.submit(
            SubmitTurn(
                turn=self._handles,
                token_ids=np.array(context, "<i4").tobytes(),
                sampling=SamplingParams(max_tokens=max_tokens),
            )
        )
        return self._handles

    def step(self) -> Iterator[tuple[int, int, bool]]:
        """Run a step; yield (handle, token, whether it was the turn's last) of each sampled row."""
        rows = self.scheduler.plan()
        output = self.sample(rows)
        columns = self.scheduler.complete(output)
        if columns is None:
            return
        self.prefilled_tokens += sum(p.spans[-1].end - p.cached_tokens for p in columns.prefills)
        handles = np.frombuffer(columns.turns, "<u4").tolist()
        self.sampled_tokens += len(handles)
        finish = columns.finish or bytes(len(handles))
        for handle, token, code in zip(handles, output.token_ids.tolist(), finish, strict=True):
            yield handle, token, code != 0

    def sample(self, rows: Sequence[EngineRow]) -> StepOutput:
        """Return random tokens for the rows that sample."""
        count = sum(row.sampling is not None for row in rows)
        tokens = self._chance.integers(0, VOCAB, count).astype(np.int32)
        return StepOutput(tokens, np.zeros(count, np.float32))

    def swap(self) -> None:
        """Swap weights, so that all KV is recomputed."""
        update = FinishWeightUpdate(
            version=self.scheduler.version + 1, pause_mode="keep", kv_policy="recompute"
        )
        self.scheduler.weights_swapped(update)


def prefilled_per_sampled(work: Workload, *, shares_prefixes: bool) -> float:
    """Return the number of prefilled tokens per sampled token."""
    chance = np.random.default_rng(1)
    engine = Engine(work.limits, shares_prefixes=shares_prefixes)
    sessions = _sessions(work, chance)
    running: dict[int, Session] = {}
    steps = 0
    while True:
        while len(running) < 2 * work.limits.max_running_turns and sessions:
            _submit(engine, sessions.popleft(), running, work, chance)
        if not running:
            return engine.prefilled_tokens / engine.sampled_tokens
        for handle, token, is_last in list(engine.step()):
            session = running[handle]
            session.context.append(token)
            if is_last:
                del running[handle]
                session.turns_left -= 1
                if session.turns_left:
                    observation_tokens = chance.geometric(1 / work.tokens_per_observation)
                    session.context += chance.integers(0, VOCAB, observation_tokens).tolist()
                    _submit(engine, session, running, work, chance)
        steps += 1
        if steps % work.steps_per_swap == 0:
            engine.swap()


def _sessions(work: Workload, chance: np.random.Generator) -> deque[Session]:
    sessions: deque[Session] = deque()
    for _ in range(work.groups):
        prompt = chance.integers(0, VOCAB, work.prompt_tokens).tolist()
        sessions += [Session(list(prompt), work.turns) for _ in range(GROUP_SIZE)]
    return sessions


def _submit(
    engine: Engine,
    session: Session,
    running: dict[int, Session],
    work: Workload,
    chance: np.random.Generator,
) -> None:
    tokens = int(chance.geometric(1 / work.turn_tokens))
    running[engine.submit(session.context, tokens)] = session


def us_per_token(*, shares_prefixes: bool) -> float:
    """Return the scheduler's CPU time per token of decoding turns."""
    engine = Engine(_limits(DECODING_TURNS, 8192), shares_prefixes=shares_prefixes)
    for number in range(DECODING_TURNS):
        engine.submit([number] * 8, DECODED_TOKENS)
    list(engine.step())
    scheduler, sampled, spent_s = engine.scheduler, 0, 0.0
    while scheduler.running_turns:
        began_s = process_time()
        rows = scheduler.plan()
        spent_s += process_time() - began_s
        output = engine.sample(rows)
        began_s = process_time()
        scheduler.complete(output)
        spent_s += process_time() - began_s
        sampled += len(rows)
    return spent_s / sampled * 1e6


def measure() -> Iterator[Row]:
    """Measure every row of the table."""
    for name, work in WORKLOADS.items():
        peer = prefilled_per_sampled(work, shares_prefixes=False)
        value = prefilled_per_sampled(work, shares_prefixes=True)
        yield compared(f"{name}_prefilled_per_sampled", "tokens", value, peer)
    samples = [
        (us_per_token(shares_prefixes=False), us_per_token(shares_prefixes=True))
        for _ in range(RUNS)
    ]
    peer, value = (statistics.median(column) for column in zip(*samples, strict=True))
    yield compared("us_per_token", "us", value, peer)


def main() -> None:
    """Measure all, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one object a line")
    show(measure(), as_json=parser.parse_args().json)


if __name__ == "__main__":
    main()
