"""Token attachments as columns of a batch: laid out, split among ranks, and sent to trainers."""

import numpy as np
import pytest
import torch

from tidegate.errors import BadFrame
from tidegate.orchestrator.batches.batch_rows import select_rows, shards
from tidegate.orchestrator.batches.batches import Batch, build_batch
from tidegate.orchestrator.core.group import Group
from tidegate.orchestrator.core.rollout import Rollout, RolloutState, Turn
from tidegate.orchestrator.trainer.remote.batch_wire import batch_from_wire, batch_to_wire
from tidegate.orchestrator.trainer.remote.columns import from_frames
from tidegate.transport.attachments import ATTACHMENTS, Attachment, AttachmentName
from tidegate.transport.messages import SamplingParams
from tidegate.transport.trainer_messages import Column

LAYERS, PER_TOKEN = 2, 3


def attach(turn: Turn, attachment: Attachment) -> None:
    assert turn.attachments is not None
    turn.attachments.append(attachment, tokens_before=0)


def routed(turn: Turn, start: int, positions: int, first: int, dtype: str = "uint8") -> None:
    ids = np.arange(first, first + positions * LAYERS * PER_TOKEN, dtype=dtype)
    shape = [LAYERS, PER_TOKEN]
    attach(turn, Attachment(0, "routed_experts", start, dtype, ids.tobytes(), shape))  # type: ignore[arg-type]


def kept(turn: Turn, *sets: list[int]) -> None:
    ids = np.array([i for each in sets for i in each], "<i4").tobytes()
    counts = np.array([len(each) for each in sets], "<u4").tobytes()
    attach(turn, Attachment(0, "kept_ids", 0, "int32", ids, counts=counts))


def rollout(number: int, turns: list[int], sampling: SamplingParams) -> Rollout:
    """Make a rollout with two given tokens before each turn of so many tokens."""
    made = Rollout(number, number // 2, number % 2)
    for tokens in turns:
        made.extend([1, 2])
        turn = Turn(made, sampling)
        made.turns.append(turn)
        for token in range(tokens):
            turn.append(50 + token, -0.5, 3, "a")
    made.reward, made.state = float(number), RolloutState.TRAINED
    return made


def batch_of(*rollouts: Rollout) -> Batch:
    groups = [
        Group(n, "task", rollouts=[row for row in rollouts if row.group_id == n])
        for n in sorted({row.group_id for row in rollouts})
    ]
    return build_batch(groups, trainer_version=3)


def floats(turn: Turn, name: AttachmentName, values: list[float], *shape: int) -> None:
    column = np.array(values, "<f4").tobytes()
    made = Attachment(0, name, 0, "float32", column, list(shape))
    turn.attach(made) if ATTACHMENTS[name].is_added else attach(turn, made)


def top(turn: Turn, k: int, ids: list[int]) -> None:
    attach(turn, Attachment(0, "top_ids", 0, "int32", np.array(ids, "<i4").tobytes(), [k]))
    floats(turn, "top_logprobs", [-0.5] * len(ids), k)


def some_batch(dtype: str = "uint8") -> Batch:
    request_of = SamplingParams(max_tokens=9, kept_tokens=True, routed_experts=True)
    first = rollout(0, [3, 2], request_of)
    routed(first.turns[0], 0, 4, 0, dtype)
    routed(first.turns[1], 0, 8, 100, dtype)
    kept(first.turns[0], [50, 51], [], [50, 52])
    kept(first.turns[1], [50], [51, 52, 53])
    floats(first.turns[1], "teacher_logprobs", [-1, -2])
    second = rollout(1, [1], SamplingParams(max_tokens=9))  # asks for nothing
    third = rollout(2, [2], request_of)
    routed(third.turns[0], 0, 3, 200, dtype)
    kept(third.turns[0], [50], [51])
    floats(third.turns[0], "teacher_logprobs", [-3, -4])
    return batch_of(first, second, third)


def test_later_reports_of_a_row_replace_earlier_ones() -> None:
    batch = some_batch()
    experts, known = batch.routed_experts, batch.routed_experts_mask
    assert experts is not None
    assert known is not None
    assert experts.shape == (3, 9, LAYERS, PER_TOKEN)
    assert experts[0, :8, 0, 0].tolist() == [100 + 6 * n for n in range(8)]
    assert known.sum(1).tolist() == [8, 0, 3]
    assert not experts[1].any()


def test_kept_sets_follow_their_tokens() -> None:
    batch = some_batch()
    assert batch.kept_counts is not None
    assert batch.kept_ids is not None
    assert batch.kept_counts.tolist() == [
        [0, 0, 2, 0, 2, 0, 0, 1, 3],
        [0, 0, 0, 0, 0, 0, 0, 0, 0],
        [0, 0, 1, 1, 0, 0, 0, 0, 0],
    ]
    assert batch.kept_ids.tolist() == [50, 51, 50, 52, 50, 51, 52, 53, 50, 51]


def test_a_batch_without_attachments_has_no_columns_for_them() -> None:
    batch = batch_of(rollout(0, [2], SamplingParams(max_tokens=9)))
    assert batch.routed_experts is None
    assert batch.kept_ids is None
    assert batch.kept_counts is None


def test_rows_and_ranks_get_their_own_attachments() -> None:
    batch = some_batch()
    picked = select_rows(batch, [2, 0])
    assert picked.kept_ids is not None
    assert picked.kept_counts is not None
    assert picked.kept_ids.tolist() == [50, 51, 50, 51, 50, 52, 50, 51, 52, 53]
    assert picked.kept_counts.sum(1).tolist() == [2, 8]
    assert picked.routed_experts is not None
    assert picked.routed_experts[1, :8, 0, 0].tolist() == [100 + 6 * n for n in range(8)]
    parts = shards(batch, 3)
    kept_ids = [part.kept_ids for part in parts if part.kept_ids is not None]
    assert sorted(len(ids) for ids in kept_ids) == [0, 2, 8]


@pytest.mark.parametrize("dtype", ["uint8", "uint16"])
def test_a_batch_arrives_at_a_trainer_with_the_same_attachments(dtype: str) -> None:
    batch = some_batch(dtype)
    received = batch_from_wire(*batch_to_wire(batch))
    columns = ("routed_experts", "routed_experts_mask", "kept_ids", "kept_counts")
    for name in (*columns, "teacher_logprobs"):
        sent, got = getattr(batch, name), getattr(received, name)
        torch.testing.assert_close(sent, got, rtol=0, atol=0, equal_nan=True)


def test_a_sampled_token_without_a_teachers_log_prob_is_not_taken_for_a_certain_one() -> None:
    logprobs = some_batch().teacher_logprobs
    assert logprobs is not None
    expected = torch.zeros(3, 9)
    expected[0, 2:5] = expected[1, 2:3] = torch.nan  # turns without scores
    expected[0, 7:], expected[2, 2:4] = torch.tensor([-1, -2]), torch.tensor([-3, -4])
    torch.testing.assert_close(logprobs, expected, equal_nan=True)


def test_turns_that_asked_for_fewer_top_tokens_are_filled_up_with_impossible_ones() -> None:
    first = rollout(0, [1], SamplingParams(max_tokens=9, top_logprobs=3))
    top(first.turns[0], 3, [50, 51, 52])
    second = rollout(1, [2], SamplingParams(max_tokens=9, top_logprobs=1))
    top(second.turns[0], 1, [50, 51])
    batch = batch_of(first, second)
    assert batch.top_ids is not None
    assert batch.top_logprobs is not None
    assert batch.top_ids[0, 2].tolist() == [50, 51, 52]
    assert batch.top_ids[1, 2:, 0].tolist() == [50, 51]
    is_possible = batch.top_logprobs.isfinite().sum(-1)
    assert is_possible.tolist() == [[0, 0, 3, 0], [0, 0, 1, 1]]


def test_a_column_whose_values_are_no_whole_entries_is_refused() -> None:
    column = Column("routed_experts", "uint8", 7, [2, 3])
    with pytest.raises(BadFrame, match=r"7 values, no whole number of entries of shape \[2, 3\]"):
        from_frames([column], [bytes(7)])
