"""Prefix sharing with real weights changes speed only, whatever happens to turns."""

import random
from dataclasses import dataclass

import pytest

from tests.engine.external.fake_engine import DrivenEngine, ReportedTurn
from tests.engine.orchestra import Models, SeenTurn
from tests.engine.replaying import replay
from tidegate.transport.messages import ABORT, RUNNING, KvPolicy, PauseMode

pytestmark = pytest.mark.slow

ROUNDING_NATS = 2e-5
"""Difference between two batches of the same float32 numbers; four times the most seen
in 20,000 tokens."""

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

    def __init__(self, engine: DrivenEngine, seed: int, *, has_sessions: bool) -> None:
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


def make_engine(models: Models, *, shares_prefixes: bool = True) -> DrivenEngine:
    return DrivenEngine(
        models.weights,
        shares_prefixes=shares_prefixes,
        max_running_turns=6,
        max_step_tokens=24,
        num_blocks=36,  # six turns of up to 15 blocks: most steps preempt, or wait for room
        block_tokens=4,
    )


def run_crowd(engine: DrivenEngine, seed: int, *, swaps: bool, has_sessions: bool = False) -> Crowd:
    """Submit, pause, end sessions and, if asked for, swap weights at random between steps."""
    crowd, chance = Crowd(engine, seed, has_sessions=has_sessions), random.Random(seed + 1)
    for step in range(STEPS):
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


@pytest.mark.parametrize("seed", range(4))
def test_pauses_and_preemptions_give_the_same_tokens_with_and_without_shared_prefixes(
    models: Models, seed: int
) -> None:
    has_sessions = seed % 2 == 1
    shared = run_crowd(make_engine(models), seed, swaps=False, has_sessions=has_sessions)
    alone = run_crowd(make_engine(models, shares_prefixes=False), seed, swaps=False)

    assert alone.cached_tokens == 0
    assert shared.cached_tokens > 100
    assert len(shared.asked) > 8
    for one, other in zip(shared.asked, alone.asked, strict=True):
        assert shared.tokens(one) == alone.tokens(other)
        assert shared.logprobs(one) == pytest.approx(alone.logprobs(other), abs=ROUNDING_NATS)


@pytest.mark.parametrize("seed", range(4))
def test_replaying_the_provenance_reproduces_every_token(models: Models, seed: int) -> None:
    crowd = run_crowd(make_engine(models), seed, swaps=True, has_sessions=seed % 2 == 1)

    assert crowd.cached_tokens > 50
    versions = [
        version for reported in crowd.engine.turns.values() for version in reported.versions
    ]
    assert set(versions) == {0, 1}
    for reported in crowd.engine.turns.values():
        seen = SeenTurn(reported.prompt, reported.sampling, reported.sampled_before)
        seen.token_ids, seen.versions, seen.prefills = (
            reported.token_ids,
            reported.versions,
            reported.prefills,
        )
        again = replay(seen, dict(enumerate(models.weights)), models.config)
        assert again.token_ids == reported.token_ids
        assert again.logprobs == pytest.approx(reported.logprobs, abs=ROUNDING_NATS)


# ---------------------------------------------------------------- new weights


def fresh_answer(models: Models, prompt: list[int], *, version: int) -> ReportedTurn:
    """Return the output of an engine that never had other weights or turns."""
    engine = DrivenEngine(models.weights[version:], num_blocks=64, block_tokens=4)
    turn = engine.submit(prompt, 8)
    engine.run()
    return engine.turns[turn]


def assert_same(reported: ReportedTurn, expected: ReportedTurn) -> None:
    assert reported.token_ids == expected.token_ids
    assert reported.logprobs == pytest.approx(expected.logprobs, abs=ROUNDING_NATS)


PROMPT = [(7 * n) % 96 for n in range(37)]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kv_policy", POLICIES)
def test_after_a_swap_a_cached_prompt_gives_the_output_of_a_fresh_engine(
    models: Models, mode: PauseMode, kv_policy: KvPolicy
) -> None:
    engine = DrivenEngine(models.weights, num_blocks=64, block_tokens=4)
    before = [engine.submit(PROMPT, 8) for _ in range(3)]
    for _ in range(7):
        engine.step()
    engine.request_swap(1, mode, kv_policy)
    after = [engine.submit(PROMPT, 8) for _ in range(3)]
    engine.run()

    old, new = (fresh_answer(models, PROMPT, version=version) for version in (0, 1))
    assert abs(old.logprobs[0] - new.logprobs[0]) > 100 * ROUNDING_NATS
    for turn in after:
        assert_same(engine.turns[turn], new)
    for turn in before:
        count = engine.turns[turn].versions.count(0)
        assert engine.turns[turn].token_ids[:count] == old.token_ids[:count]


@pytest.mark.parametrize("kv_policy", POLICIES)
def test_a_pause_and_swap_in_mid_prefill_leave_no_stale_kv(
    models: Models, kv_policy: KvPolicy
) -> None:
    engine = DrivenEngine(models.weights, num_blocks=64, block_tokens=4)
    straddler = engine.submit(PROMPT, 8)
    engine.step()
    engine.step()
    engine.scheduler.pause("keep")
    engine.request_swap(1, "keep", kv_policy)
    engine.settle()
    engine.scheduler.resume()
    late = [engine.submit(PROMPT, 8) for _ in range(2)]
    engine.run()
    later = engine.submit(PROMPT, 8)
    engine.run()

    expected = fresh_answer(models, PROMPT, version=1)
    for turn in (*late, later):
        assert_same(engine.turns[turn], expected)
    assert engine.turns[later].prefills[0].cached_tokens == 36
    if kv_policy == "recompute":
        assert_same(engine.turns[straddler], expected)
    else:
        assert engine.turns[straddler].prefills[0].spans[0].version == 0
