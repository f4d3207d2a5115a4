"""Groups of turns at random: submitted, paused, preempted and swapped between steps, by a seed.

Tests of the scheduler with real weights use it, through any :class:`FakeEngine`.
"""

import random
from dataclasses import dataclass

from tests.engine.external.fake_engine import FakeEngine, ReportedTurn
from tidegate.transport.messages import ABORT, RUNNING, KvPolicy, PauseMode

MODES: tuple[PauseMode, ...] = ("abort", "keep", "wait")
POLICIES: tuple[KvPolicy, ...] = ("keep", "recompute")
STEPS = 100


@dataclass
class Asked:
    """A turn as its user sees it, however often it was submitted."""

    prompt: list[int]
    max_tokens: int
    seed: int
    temperature: float
    submissions: list[int]
    session: int = 0


class Crowd:
    """Groups of samples and their continuations, submitted as a seed says."""

    def __init__(self, engine: FakeEngine, seed: int, *, has_sessions: bool) -> None:
        self.engine = engine
        self.has_sessions = has_sessions
        self.random = random.Random(seed)
        self.asked: list[Asked] = []

    def submit_group(self) -> None:
        """Submit samples of one prompt; prompts begin with one of two system prompts."""
        chance = self.random
        system = [chance.randrange(2)] * chance.randrange(1, 20)
        own = [chance.randrange(96) for _ in range(chance.randrange(1, 20))]
        for _ in range(chance.randrange(1, 5)):
            asked = Asked(
                [*system, *own],
                max_tokens=chance.randrange(1, 20),
                seed=chance.randrange(1000),
                temperature=chance.choice([0.0, 1.0]),
                submissions=[],
                session=len(self.asked) + 1 if self.has_sessions else 0,
            )
            self.asked.append(asked)
            self.submit(asked, priority=chance.randrange(3))

    def submit(self, asked: Asked, priority: int = 0) -> None:
        """Submit the rest of a turn."""
        done = self.tokens(asked)
        turn = self.engine.submit(
            [*asked.prompt, *done],
            asked.max_tokens - len(done),
            priority=priority,
            sampled_before=len(done),
            seed=asked.seed,
            temperature=asked.temperature,
            session=asked.session,
        )
        asked.submissions.append(turn)

    def submit_aborted_again(self) -> None:
        """Resubmit aborted turns, as an orchestrator does after a pause."""
        for asked in self.asked:
            if self.engine.turns[asked.submissions[-1]].finish == ABORT:
                self.submit(asked)

    def reported(self, asked: Asked) -> list[ReportedTurn]:
        return [self.engine.turns[turn] for turn in asked.submissions]

    def tokens(self, asked: Asked) -> list[int]:
        return [token for reported in self.reported(asked) for token in reported.token_ids]

    def logprobs(self, asked: Asked) -> list[float]:
        return [logprob for reported in self.reported(asked) for logprob in reported.logprobs]

    def finish(self) -> None:
        """Run until all turns have ended."""
        self.engine.scheduler.resume()
        self.submit_aborted_again()
        self.engine.run()
        self.engine.scheduler.check()
        for reported in self.engine.turns.values():
            assert reported.finish != RUNNING

    @property
    def cached_tokens(self) -> int:
        return sum(
            p.cached_tokens for reported in self.engine.turns.values() for p in reported.prefills
        )


def run_crowd(
    engine: FakeEngine, seed: int, *, swaps: bool, has_sessions: bool = False, steps: int = STEPS
) -> Crowd:
    """Submit, pause, end sessions and, if asked for, swap weights at random between steps."""
    crowd, chance = Crowd(engine, seed, has_sessions=has_sessions), random.Random(seed + 1)
    for step in range(steps):
        if step % 10 == 0:
            crowd.submit_group()
        if has_sessions and step % 5 == 0:  # of turns that run, wait, or ended long ago
            engine.scheduler.sessions.end([1 + chance.randrange(len(crowd.asked))])
        if chance.random() < 0.1:
            engine.scheduler.pause(chance.choice(MODES), clear_cache=chance.random() < 0.2)
            engine.settle()
        if swaps and chance.random() < 0.1:
            engine.request_swap(
                1 - engine.scheduler.version, chance.choice(MODES), chance.choice(POLICIES)
            )
            engine.settle()
        if chance.random() < 0.4:
            engine.scheduler.resume()
            crowd.submit_aborted_again()
        engine.step()
        engine.scheduler.check()
    crowd.finish()
    return crowd
