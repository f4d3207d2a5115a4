"""Steps with impossible numbers are refused, whatever their length."""

import math
from array import array

import pytest

from tidegate.errors import BadFrame
from tidegate.orchestrator.core.events import StepArrived
from tidegate.orchestrator.core.step_checks import LOGPROB_MIN, check_step

VOCAB_SIZE = 100


def arrived(token_ids: list[int], logprobs: list[float]) -> StepArrived:
    """Make a step with one row per token."""
    return StepArrived(
        engine="a",
        version=0,
        turns=memoryview(array("I", range(len(token_ids)))),
        token_ids=memoryview(array("i", token_ids)),
        logprobs=memoryview(array("f", logprobs)),
        finish=b"",
        counts=None,
        prefills=[],
    )


def check(event: StepArrived) -> None:
    check_step(event, vocab_size=VOCAB_SIZE, newest_version=0)


@pytest.mark.parametrize("tokens", [1, 2, 49])
@pytest.mark.parametrize("bad", [-1, VOCAB_SIZE, -(1 << 31)])
def test_a_token_outside_of_the_vocabulary_is_refused_wherever_it_is(tokens: int, bad: int) -> None:
    fine = [VOCAB_SIZE - 1] * tokens
    check(arrived(fine, [-1.0] * tokens))
    for at in {0, tokens // 2, tokens - 1}:
        with pytest.raises(BadFrame, match=rf"token_ids\[{at}\] is {bad}"):
            check(arrived([*fine[:at], bad, *fine[at + 1 :]], [-1.0] * tokens))


@pytest.mark.parametrize("tokens", [1, 2, 49])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 0.5, 2 * LOGPROB_MIN])
def test_what_is_no_log_prob_is_refused_wherever_it_is(tokens: int, bad: float) -> None:
    fine = [0.0, LOGPROB_MIN][:tokens] + [-1.0] * (tokens - 2)
    check(arrived([0] * tokens, fine))
    for at in {0, tokens // 2, tokens - 1}:
        with pytest.raises(BadFrame, match=rf"logprobs\[{at}\] is"):
            check(arrived([0] * tokens, [*fine[:at], bad, *fine[at + 1 :]]))
