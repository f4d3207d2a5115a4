"""Out-of-memory steps: the engine continues with smaller ones, and loses no token."""

from pathlib import Path

import pytest

from tests.engine.external.fake_engine import FakeEngine, uninterrupted
from tests.engine.memory.hungry_worker import TOKENS_MAX
from tests.engine.orchestra import PROMPT, Models, Orchestra
from tests.engine.replaying import assert_replays
from tidegate.engine.memory.out_of_memory import RECOVERY_STEPS, StepBudget
from tidegate.transport.messages import LENGTH, MessageRejected, SamplingParams, Step

pytestmark = pytest.mark.wire


def test_after_an_out_of_memory_step_turns_continue_in_smaller_steps(
    models: Models, tmp_path: Path
) -> None:
    program = "tests.engine.memory.hungry_worker"
    options = ["--max-step-tokens=64", "--max-running-turns=16", "--num-kv-blocks=128", "tight"]
    with Orchestra(tmp_path, models.directories[0], options, program=program) as engine:
        engine.welcome(credit_steps=64)
        turns = [
            engine.submit(PROMPT[: 3 + n], SamplingParams(max_tokens=12, seed=n)) for n in range(9)
        ]
        for turn in turns:
            assert engine.finish(turn).finish == LENGTH
            assert_replays(turn, engine, {0: models.weights[0]})
        sizes = [len(m.turns) // 4 for m in engine.log if isinstance(m, Step)]
        assert max(sizes) <= TOKENS_MAX
        reported = [
            message.message for message in engine.log if isinstance(message, MessageRejected)
        ]
        assert reported[0].startswith("out of memory in a step of ")
        assert reported[0].endswith(" tokens")
        assert 1 <= len(reported) <= 6  # enough to halve 64 to 1
        assert engine.await_heartbeat(2).out_of_memory_steps == len(reported)
        assert engine.stderr.read_text().count("warning: out of memory") == len(reported)


def test_blocks_of_a_failed_step_are_not_shared() -> None:
    engine = FakeEngine(max_step_tokens=32)
    prompt = list(range(20))
    for _ in range(3):  # they share a prefill that is planned, and then fails
        engine.submit(prompt, 4)
    rows = engine.scheduler.plan()
    assert engine.scheduler.fail(sum(len(row.token_ids) for row in rows))
    engine.scheduler.check()
    assert engine.scheduler.running_turns == 0
    engine.submit(prompt, 4)
    engine.run()
    assert {tuple(t.token_ids) for t in engine.turns.values()} == {tuple(uninterrupted(prompt, 4))}


def test_a_step_of_one_token_cannot_be_made_smaller() -> None:
    budget = StepBudget(8)
    assert [budget.fail(tokens) for tokens in (8, 4, 2, 1)] == [True, True, True, False]


def test_steps_grow_again_after_many_successful_ones() -> None:
    budget = StepBudget(100)
    budget.fail(90)
    seen = []
    for _ in range(2 * RECOVERY_STEPS + 5):
        seen.append(budget.tokens)
        budget.succeed()
    assert seen == [45] * RECOVERY_STEPS + [90] * RECOVERY_STEPS + [100] * 5
