"""What does a core's state look like as bytes? One struct per thing, in MessagePack arrays.

No task is in it, for those are the user's; nothing here knows how a state is taken or loaded.
"""

import msgspec

from tidegate.orchestrator.core.discards import SavedDiscards
from tidegate.orchestrator.core.group import TaskKey
from tidegate.orchestrator.core.provenance import TurnPrefill, VersionRun
from tidegate.orchestrator.core.rollout import RolloutState
from tidegate.transport.media import Media, MediaKind
from tidegate.transport.messages import SamplingParams


class Saved(msgspec.Struct, array_like=True):
    """Base of what is saved."""


class SavedTurn(Saved):
    """A turn; its tokens are in its rollout's context."""

    sampling: SamplingParams
    start: int
    length: int
    runs: list[VersionRun]
    prefills: list[TurnPrefill]
    finish_reason: str | None
    raw_logprobs: bytes = b""
    top_ids: bytes = b""
    top_logprobs: bytes = b""
    reward: float | None = None
    media: tuple[Media, ...] = ()


class SavedRollout(Saved):
    """A rollout, with what the core knows of its context."""

    rollout_id: int
    index: int
    token_ids: bytes
    logprobs: bytes
    turns: list[SavedTurn]
    reward: float | None
    state: RolloutState
    discard_reason: str | None
    oldest_trainable: int
    branch_of: int | None = None
    fork_reason: str = ""


class SavedGroup(Saved):
    """A group and all its rollouts."""

    group_id: int
    key: TaskKey | None
    digest: bytes
    running: int
    rollouts: list[SavedRollout]
    version_floor: int
    is_retaken: bool
    split_from: int | None
    sibling_rewards: list[float]


class SavedSubmission(Saved):
    """A turn on an engine: always its rollout's last."""

    handle: int
    rollout_id: int
    priority: int
    sampled_before: int


class SavedEngine(Saved):
    """An engine and the turns it has."""

    name: str
    epoch: int
    weight_version: int
    max_running_turns: int
    submissions: list[SavedSubmission]
    missing: list[int]
    replay_until: int
    is_away: bool
    speed: float
    media: tuple[MediaKind, ...] = ()


class SavedBatch(Saved):
    """A batch that was handed over and still matters."""

    number: int
    num_groups: int
    trainer_version: int
    version: int | None
    groups: list[SavedGroup]
    is_holding: bool
    is_kept: bool


class SavedLedger(Saved):
    """The accounts."""

    generated: int
    in_flight: int
    buffered: int
    trained: int
    discarded: dict[str, int]


class SavedTurns(Saved):
    """Which turn is where."""

    engines: list[SavedEngine]
    live_version: int
    next_handle: int
    waiting: list[tuple[int, int]]
    """(rollout id, priority)"""
    streams: dict[str, tuple[int, int]]
    media_taken: list[MediaKind] = []


class SavedTasks(Saved):
    """Which tasks have been taken."""

    offer: int
    counts: list[tuple[int, int]]
    requeued: list[TaskKey]
    is_continued: bool
    gone_before: int


class SavedTraining(Saved):
    """What the trainer has had."""

    batches: list[SavedBatch]
    count: int
    safe: int
    safe_offer: int
    versions: list[tuple[int, int]]
    trained_batches: int
    trained_rollouts: int
    mixed_version: int
    staleness: list[tuple[int, int]]


class SavedCore(Saved):
    """All of it."""

    trainer_version: int
    batches_asked: int
    are_tasks_exhausted: bool
    is_restoring: bool
    awaited: list[TaskKey]
    groups: list[SavedGroup]
    evaluations: list[SavedGroup]
    next_rollout_id: int
    next_group_id: int
    ledger: SavedLedger
    evaluation_ledger: SavedLedger
    discarded_rollouts: dict[str, int]
    discards: SavedDiscards
    turns: SavedTurns
    tasks: SavedTasks
    training: SavedTraining
    ended: list[int]
    """Buffered groups, in the order in which they ended."""
    floors_version: int
    is_paused: bool
    adaptation: int | None
    """Of the staleness policy."""
    prompts: list[tuple[bytes, int, float]]
    """(digest, rollouts, total reward)"""
    passed_over: int
