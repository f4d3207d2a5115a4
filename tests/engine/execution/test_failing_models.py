"""Model code that raises ends the turns it raises for, and the engine only if it never works."""

from pathlib import Path

import pytest

from tests.engine.execution.failing_worker import EXIT, LONG, POISON
from tests.engine.orchestra import Models, Orchestra
from tidegate.transport.messages import LENGTH, Goodbye, SamplingParams, TurnFailed
from tidegate.transport.sampling import LogitsProcessor
from tidegate.transport.scoring import ScoreFailed, ScoreResult, ScoreTokens

pytestmark = pytest.mark.wire

SOUND = LogitsProcessor("disallowed_tokens", {"token_ids": [POISON, EXIT]}).to_str()

PROGRAM = "tests.engine.execution.failing_worker"


def asked(max_tokens: int, seed: int = 0) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, seed=seed, logits_processors=[SOUND])


def test_turns_for_which_the_models_code_raises_fail_and_the_others_continue(
    models: Models, tmp_path: Path
) -> None:
    with Orchestra(tmp_path, models.directories[0], program=PROGRAM) as engine:
        engine.welcome(credit_steps=64)
        sound = [engine.submit([1, 2, 3 + n], asked(20, n)) for n in range(4)]
        poisoned = engine.submit([1, POISON, 3], asked(4))
        exiting = engine.submit([EXIT], asked(4))
        long = engine.submit([1, 2, 3], asked(2 * LONG))
        column = bytes(4) + POISON.to_bytes(4, "little") + bytes(4)
        engine.send(ScoreTokens(request_id=1, token_ids=column, score_kind="logprobs", start=1))
        engine.send(ScoreTokens(request_id=2, token_ids=bytes(12), score_kind="logprobs", start=1))
        for turn in sound:
            assert engine.finish(turn).finish == LENGTH
        while engine.await_heartbeat().running_turns:
            pass
        refusals = [each for each in engine.log if isinstance(each, TurnFailed)]
        refused = {refusal.turn: refusal.message for refusal in refusals}
        assert refused == {
            poisoned: "the model's code failed: IndexError: index out of range in self",
            exiting: "the model's code failed: SystemExit: enough",
            long: "the model's code failed: KeyError: 'position'",
        }
        assert len(engine.turns[long].token_ids) >= LONG - 4
        assert [each.request_id for each in engine.log if isinstance(each, ScoreFailed)] == [1]
        assert [each.request_id for each in engine.log if isinstance(each, ScoreResult)] == [2]
        for turn in sound:  # what they had sampled beside the others is what they sample alone
            seen = engine.turns[turn]
            alone = engine.generate(seen.prompt, seen.sampling)
            assert alone.token_ids == seen.token_ids
        heartbeat = engine.await_heartbeat(2)
        assert heartbeat.running_turns == heartbeat.waiting_turns == 0
        assert engine.process.poll() is None


def test_an_engine_whose_every_step_fails_ends_and_says_that_it_has_failed(
    models: Models, tmp_path: Path
) -> None:
    with Orchestra(tmp_path, models.directories[0], ["broken"], program=PROGRAM) as engine:
        engine.welcome()
        for _ in range(3):
            engine.submit([1, 2, 3], asked(4))
        goodbye = engine.await_one(Goodbye)
        assert goodbye.reason == "failed: RuntimeError: no kernel image is available"
        assert goodbye.has_failed
        assert engine.exit_status() == 1
