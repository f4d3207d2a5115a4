from dataclasses import fields, replace
from random import Random
from typing import Any

import torch

from tidegate.orchestrator.batches.batch_rows import batch_columns, select_rows
from tidegate.orchestrator.batches.batches import build_batch
from tidegate.orchestrator.batches.version_runs import NOT_SAMPLED
from tidegate.orchestrator.core.group import Group
from tidegate.orchestrator.core.rollout import Rollout, RolloutState, Turn
from tidegate.orchestrator.trainer.remote.batch_wire import batch_from_wire, batch_to_wire
from tidegate.orchestrator.weight_sync.state_dict import named_buffers, own_parts
from tidegate.policies.advantages import relative_to_group, relative_to_trained_first
from tidegate.transport.messages import SamplingParams


def rollout(group_id: int, index: int, reward: float, turns: list[list[int]]) -> Rollout:
    """Make a rollout with two prompt tokens before each turn, sampled by the given versions."""
    made = Rollout(group_id * 10 + index, group_id, index)
    for versions in turns:
        made.extend([1, 2])
        turn = Turn(made, SamplingParams(max_tokens=9))
        made.turns.append(turn)
        for version in versions:
            turn.append(50 + version, -0.5, version, "a")
    made.reward, made.state = reward, RolloutState.TRAINED
    return made


def two_groups() -> list[Group]:
    short = rollout(0, 0, 1.0, [[3, 3]])
    long = rollout(0, 1, 0.0, [[2, 3], [4]])
    lost = rollout(0, 2, 0.0, [[9]])
    lost.state = RolloutState.DISCARDED
    other = rollout(1, 0, 0.5, [[4]])
    return [Group(0, "task", rollouts=[short, long, lost]), Group(1, "task", rollouts=[other])]


def test_the_mask_and_the_versions_mark_exactly_the_sampled_tokens() -> None:
    batch = build_batch(two_groups(), trainer_version=4)
    x = NOT_SAMPLED
    assert batch.weight_versions.tolist() == [
        [x, x, 3, 3, x, x, x],
        [x, x, 2, 3, x, x, 4],
        [x, x, 4, x, x, x, x],
    ]
    assert torch.equal(batch.loss_mask, batch.weight_versions != x)
    assert batch.token_ids.tolist() == [
        [1, 2, 53, 53, 0, 0, 0],
        [1, 2, 52, 53, 1, 2, 54],
        [1, 2, 54, 0, 0, 0, 0],
    ]
    assert batch.attention_mask.sum(1).tolist() == [4, 7, 3]
    assert batch.sampled_tokens == 6


def test_each_row_says_which_use_of_its_group_it_is_for_also_on_the_wire() -> None:
    first, second = two_groups()
    batch = build_batch([first.for_next_use(), second], trainer_version=5)
    assert batch.uses.tolist() == [2, 2, 1]
    assert batch_from_wire(*batch_to_wire(batch)).uses.tolist() == [2, 2, 1]
    assert select_rows(batch, [2]).uses.tolist() == [1]
    assert batch.logprobs[0].equal(build_batch([first, second], trainer_version=4).logprobs[0])


def test_a_batch_of_first_uses_is_sent_as_to_trainers_that_know_no_others() -> None:
    assert "uses" not in batch_columns(build_batch(two_groups(), trainer_version=4))


def test_a_discarded_rollout_is_not_in_the_batch() -> None:
    batch = build_batch(two_groups(), trainer_version=4)
    assert batch.rewards.tolist() == [1.0, 0.0, 0.5]
    assert batch.group_ids.tolist() == [0, 0, 1]


def test_staleness_is_counted_from_the_oldest_token_of_the_row() -> None:
    assert build_batch(two_groups(), trainer_version=4).staleness.tolist() == [1, 2, 0]


def test_advantages_compare_a_rollout_with_its_own_group() -> None:
    advantages = build_batch(two_groups(), trainer_version=4).advantages
    assert advantages[0] > 0 > advantages[1]
    assert advantages[2] == 0  # alone in its group


def test_rollouts_that_are_each_alone_in_their_group_have_no_advantage() -> None:
    alone = [Group(n, "task", rollouts=[rollout(n, 0, float(n), [[3]])]) for n in (0, 1)]
    torch.set_default_dtype(torch.bfloat16)  # another thread loads a model meanwhile
    try:
        advantages = build_batch(alone, trainer_version=4).advantages
    finally:
        torch.set_default_dtype(torch.float32)
    assert advantages.dtype is torch.float32
    assert advantages.tolist() == [0.0, 0.0]


def test_rewards_that_float32_can_not_distinguish_have_no_advantage() -> None:
    rewards = [0.3, 0.1 + 0.2]  # distinguished by the last bit of 53, of which a batch has 24
    group = Group(0, "task", rollouts=[rollout(0, n, r, [[3]]) for n, r in enumerate(rewards)])
    assert build_batch([group], trainer_version=4).advantages.tolist() == [0.0, 0.0]


def some_groups(random: Random) -> list[Group]:
    """Make groups of several sizes, some with lost rollouts or branches, or split remainders."""
    groups: list[Group] = []
    for group_id in random.sample(range(9), 4):
        count = random.randrange(1, 5)
        own = [rollout(group_id, n, random.choice([0.0, 0.1, 1.0]), [[3]]) for n in range(count)]
        if count > 1 and random.random() < 0.5:
            own[random.randrange(count)].state = RolloutState.DISCARDED
        for number in range(random.randrange(3)):
            forked = random.choice([row for row in own if row.state is RolloutState.TRAINED])
            branch = rollout(group_id, 9 - number, forked.reward or 0.0, [[3]])
            branch.branch_of = forked
            own.append(branch)
        siblings = random.choices([0.0, 0.1, 1.0], k=random.randrange(3))
        groups.append(Group(group_id, "task", rollouts=own, sibling_rewards=siblings))
    return groups


def test_each_row_has_its_rollouts_advantage_in_its_group_wherever_the_group_is() -> None:
    for seed in range(200):
        groups = some_groups(Random(seed))
        batch = build_batch(groups, trainer_version=4)
        rows = list(zip(batch.group_ids.tolist(), batch.rollout_ids.tolist(), strict=True))
        rewards = dict(zip(rows, batch.rewards.tolist(), strict=True))
        advantages: dict[tuple[int, int], float] = {}
        for group in groups:
            own = {row: reward for row, reward in rewards.items() if row[0] == group.group_id}
            first = torch.tensor(group.sibling_rewards).tolist()
            values = [*own.values()]
            of_own = (
                relative_to_trained_first(values, first) if first else relative_to_group(values)
            )
            advantages |= zip(own, of_own, strict=True)
        wanted = torch.tensor([advantages[row] for row in rows])
        torch.testing.assert_close(batch.advantages, wanted, atol=1e-6, rtol=1e-6, msg=str(seed))


def test_packed_and_padded_hold_the_same_rows() -> None:
    batch = build_batch(two_groups(), trainer_version=4)
    packed = batch.packed
    assert packed.cu_seqlens.tolist() == [0, 4, 11, 14]
    for name in ("token_ids", "loss_mask", "logprobs", "weight_versions"):
        padded = getattr(batch, name)[batch.attention_mask]
        assert torch.equal(padded, getattr(packed, name)), name
    assert torch.equal(packed.position_ids[4:11], torch.arange(7))
    assert packed.position_ids.dtype == packed.row_ids.dtype == torch.int64
    assert packed.row_ids.tolist() == [0] * 4 + [1] * 7 + [2] * 3
    assert packed.row_ids is packed.row_ids  # made once


def test_what_is_made_of_a_packed_batch_is_where_its_columns_have_been_moved() -> None:
    packed = build_batch(two_groups(), trainer_version=4).packed
    values = {field.name: getattr(packed, field.name) for field in fields(packed)}
    columns: dict[str, Any] = {
        name: value for name, value in values.items() if isinstance(value, torch.Tensor)
    }
    moved = replace(packed, **{name: column.to("meta") for name, column in columns.items()})
    for ids in (moved.row_ids, moved.position_ids):
        assert (ids.device.type, ids.dtype, ids.shape) == ("meta", torch.int64, (14,))


def test_a_state_dict_becomes_its_bytes_and_tied_tensors_travel_once() -> None:
    head = torch.arange(6, dtype=torch.bfloat16).view(2, 3)
    state = {"embed": head, "head": head, "turned": head.t(), "scalar": torch.tensor(2.0)}
    buffers = {buffer.name: buffer for buffer in named_buffers(state)}
    assert list(buffers) == ["embed", "turned", "scalar"]
    assert (buffers["turned"].dtype, buffers["turned"].shape) == ("bfloat16", (3, 2))
    turned = torch.frombuffer(bytearray(buffers["turned"].data), dtype=torch.bfloat16)
    assert torch.equal(turned.view(3, 2), head.t())


def test_a_square_matrix_and_other_views_of_its_memory_travel_each() -> None:
    square = torch.arange(4, dtype=torch.bfloat16).view(2, 2)
    state = {"square": square, "turned": square.t(), "bits": square.view(torch.float16)}
    state["again"] = square.t()
    assert [buffer.name for buffer in named_buffers(state)] == ["square", "turned", "bits"]
    parts = own_parts(state, rank=0)
    assert [part.buffer.name for part in parts] == ["square", "turned", "bits"]
    sent = torch.frombuffer(bytearray(parts[1].buffer.data), dtype=torch.bfloat16)
    assert torch.equal(sent.view(2, 2), square.t())
