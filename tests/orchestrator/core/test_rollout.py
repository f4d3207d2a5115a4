from typing import Any

import pytest

from tidegate.orchestrator.core.provenance import TurnPrefill
from tidegate.orchestrator.core.rollout import Rollout, Turn
from tidegate.transport.messages import KvSpan, SamplingParams


def a_turn(prompt: int = 4) -> Turn:
    rollout = Rollout(0, 0, 0)
    rollout.extend(list(range(prompt)))
    turn = Turn(rollout, SamplingParams(max_tokens=16))
    rollout.turns.append(turn)
    return turn


def sample(turn: Turn, *versions: int, engine: str = "a") -> None:
    for version in versions:
        turn.append(5, -1.0, version, engine)


FRESH = ((3, 0, 4),)
"""KV spans (version, start, end) of a prompt of four tokens that version 3 has prefilled."""


@pytest.mark.parametrize(
    ("story", "spans"),
    [
        ([(0, FRESH), "a 3 3 3"], [(3, 0, 3, "fresh")]),
        (
            [(0, FRESH), "a 3 3 4 5"],  # the KV was kept
            [(3, 0, 2, "fresh"), (4, 2, 3, "mixed(3, 4)"), (5, 3, 4, "mixed(3, 5)")],
        ),
        (
            [(0, FRESH), "a 3 3", (2, ((4, 0, 6),)), "a 4 4"],  # and here computed again
            [(3, 0, 2, "fresh"), (4, 2, 4, "fresh")],
        ),
        ([(0, ((3, 0, 2), (4, 2, 4))), "a 4"], [(4, 0, 1, "mixed(3, 4)")]),
        (["a 3"], [(3, 0, 1, "unknown")]),
        ([(0, FRESH), "a 3", (1, ((4, 0, 5),))], [(3, 0, 1, "fresh")]),
        (
            [(0, FRESH), "a 3 3", "b 4 4"],  # an engine that reports no prefill
            [(3, 0, 2, "fresh"), (4, 2, 4, "unknown")],
        ),
        (
            ["a 3 3", (2, ((4, 0, 6),)), "b 4", "a 4"],
            [(3, 0, 2, "unknown"), (4, 2, 3, "fresh"), (4, 3, 4, "unknown")],
        ),
    ],
)
def test_spans_have_the_version_of_each_token_and_what_is_known_of_the_kv_that_it_saw(
    story: list[Any], spans: list[tuple[int, int, int, str]]
) -> None:
    """A story has prefills, (output tokens before it, KV spans), and sampled tokens' versions."""
    turn = a_turn()
    for each in story:
        if isinstance(each, str):
            engine, *versions = each.split()
            sample(turn, *map(int, versions), engine=engine)
        else:
            at, kv = each
            prefill = TurnPrefill(at, tuple(KvSpan(*span) for span in kv))
            turn.prefills = (*turn.prefills, prefill)
    assert [(s.version, s.start, s.end, s.kv_label) for s in turn.spans()] == spans


def test_the_context_is_what_the_model_read_and_wrote_in_order() -> None:
    turn = a_turn(prompt=2)
    sample(turn, 0, 0)
    turn.rollout.extend([8, 9])
    assert turn.rollout.token_ids.tolist() == [0, 1, 5, 5, 8, 9]
    assert turn.rollout.logprobs.tolist() == [0.0, 0.0, -1.0, -1.0, 0.0, 0.0]
    assert turn.rollout.sampled_tokens == 2


@pytest.mark.parametrize(("versions", "oldest", "newest"), [([2], 2, 2), ([2, 3, 5], 2, 5)])
def test_a_rollouts_age_is_that_of_its_oldest_token(
    versions: list[int], oldest: int, newest: int
) -> None:
    turn = a_turn()
    sample(turn, *versions)
    assert (turn.rollout.oldest_version, turn.rollout.newest_version) == (oldest, newest)
