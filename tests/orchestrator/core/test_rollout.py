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


def prefill(turn: Turn, at: int, *spans: tuple[int, int, int]) -> None:
    turn.prefills = (*turn.prefills, TurnPrefill(at, tuple(KvSpan(*span) for span in spans)))


def sample(turn: Turn, *versions: int, engine: str = "a") -> None:
    for version in versions:
        turn.append(5, -1.0, version, engine)


def described(turn: Turn) -> list[tuple[int, int, int, str]]:
    return [(s.version, s.start, s.end, s.kv_label) for s in turn.spans()]


def test_tokens_of_one_version_over_fresh_kv_are_one_span() -> None:
    turn = a_turn()
    prefill(turn, 0, (3, 0, 4))
    sample(turn, 3, 3, 3)
    assert described(turn) == [(3, 0, 3, "fresh")]


def test_kept_kv_makes_the_tokens_after_an_update_mixed() -> None:
    turn = a_turn()
    prefill(turn, 0, (3, 0, 4))
    sample(turn, 3, 3, 4, 5)
    assert described(turn) == [
        (3, 0, 2, "fresh"),
        (4, 2, 3, "mixed(3, 4)"),
        (5, 3, 4, "mixed(3, 5)"),
    ]


def test_recomputed_kv_makes_them_fresh_again() -> None:
    turn = a_turn()
    prefill(turn, 0, (3, 0, 4))
    sample(turn, 3, 3)
    prefill(turn, 2, (4, 0, 6))
    sample(turn, 4, 4)
    assert described(turn) == [(3, 0, 2, "fresh"), (4, 2, 4, "fresh")]


def test_a_prompt_whose_prefill_crossed_an_update_is_mixed_from_the_first_token() -> None:
    turn = a_turn()
    prefill(turn, 0, (3, 0, 2), (4, 2, 4))
    sample(turn, 4)
    assert described(turn) == [(4, 0, 1, "mixed(3, 4)")]


def test_without_a_report_of_the_kv_the_provenance_is_unknown() -> None:
    turn = a_turn()
    sample(turn, 3)
    assert described(turn) == [(3, 0, 1, "unknown")]


def test_a_prefill_without_tokens_after_it_makes_no_span() -> None:
    turn = a_turn()
    prefill(turn, 0, (3, 0, 4))
    sample(turn, 3)
    prefill(turn, 1, (4, 0, 5))
    assert described(turn) == [(3, 0, 1, "fresh")]


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


def test_an_engine_without_prefills_leaves_the_kv_of_a_turn_that_moves_to_it_unknown() -> None:
    turn = a_turn()
    prefill(turn, 0, (0, 0, 4))
    sample(turn, 0, 0)
    sample(turn, 1, 1, engine="b")
    assert described(turn) == [(0, 0, 2, "fresh"), (1, 2, 4, "unknown")]


def test_a_turn_that_moves_on_to_an_engine_with_prefills_is_known_again() -> None:
    turn = a_turn()
    sample(turn, 0, 0)
    prefill(turn, 2, (1, 0, 6))
    sample(turn, 1, engine="b")
    sample(turn, 1)
    assert described(turn) == [(0, 0, 2, "unknown"), (1, 2, 3, "fresh"), (1, 3, 4, "unknown")]
