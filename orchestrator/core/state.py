"""Codec of a core's whole state: MessagePack bytes, saved in the journal and loaded after a crash.

:class:`RunJournal` saves and loads snapshots; replays compare :func:`digest`. The state contains
everything that the next event could depend on. It omits two things. A task that is not plain data
is omitted, because the user's iterator gives it again. Tokens that an episode appended are omitted
until an event reports them. Equal bytes mean equal cores. Built on :class:`Core` and its parts,
which save and load themselves through the ``Saved`` structs here and in ``discards.py`` and
``task_records.py``.
"""

import hashlib
from collections import Counter, deque
from typing import Any

import msgspec

from tidegate.orchestrator.core import events as ev
from tidegate.orchestrator.core.core import Core
from tidegate.orchestrator.core.discards import SavedDiscards
from tidegate.orchestrator.core.event_log import task_of
from tidegate.orchestrator.core.failure_counts import FailureKey
from tidegate.orchestrator.core.group import Group, TaskKey
from tidegate.orchestrator.core.hand_over import HandedBatch, WaitingRequest
from tidegate.orchestrator.core.ledger import Ledger
from tidegate.orchestrator.core.placement import EngineTurns
from tidegate.orchestrator.core.provenance import TurnPrefill, VersionRun
from tidegate.orchestrator.core.rollout import Rollout, RolloutState, Turn
from tidegate.orchestrator.core.rules import record_of
from tidegate.orchestrator.core.task_records import SavedTaskRecords
from tidegate.orchestrator.core.token_attachments import TurnAttachments
from tidegate.policies.filters import PromptHistory
from tidegate.transport.media import Media, MediaKind
from tidegate.transport.messages import Attachment, SamplingParams


class Saved(msgspec.Struct, array_like=True):
    """Base of saved records."""


class SavedTurn(Saved):
    """Saved form of a turn; its tokens are in its rollout's context."""

    sampling: Any
    """``SamplingParams``; decoded from a map, whose keys may be the names of an older version."""
    start: int
    length: int
    runs: list[VersionRun]
    prefills: list[TurnPrefill]
    finish_reason: str | None
    attachments: list[Attachment] = []
    reward: float | None = None
    media: tuple[Media, ...] = ()
    losses: int = 0
    consecutive_losses: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.sampling, SamplingParams):
            self.sampling = SamplingParams.from_record(self.sampling)


class SavedRollout(Saved):
    """Saved form of a rollout and its context, as far as events have reported it."""

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
    retries: int = 0
    pinned_version: int | None = None
    home: int | None = None
    """Id of the rollout whose episode samples this rollout as one of its agents; None for other
    rollouts."""


class SavedGroup(Saved):
    """Saved form of a group and all its rollouts."""

    group_id: int
    key: TaskKey | None
    digest: bytes
    running: int
    rollouts: list[SavedRollout]
    oldest_possible_version: int
    is_retaken: bool
    split_from: int | None
    sibling_rewards: list[float]
    body: bytes = b""
    """The task as bytes; empty if it is not plain data."""
    is_agents: bool = False
    home: tuple[str, int] | None = None
    """Adapter and id of the group whose episodes sample this group as one of their agents; None for
    other groups."""


class SavedSubmission(Saved):
    """Saved form of a submitted turn, which is always the last turn of its rollout."""

    handle: int
    rollout_id: int
    priority: int
    sampled_before: int


class SavedEngine(Saved):
    """Saved form of an engine and of the turns submitted to it."""

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
    is_draining: bool = False
    is_for_evaluation: bool = False


class SavedBatch(Saved):
    """Saved form of a batch that was handed over and may still be needed."""

    number: int
    num_groups: int
    trainer_version: int
    version: int | None
    groups: list[SavedGroup]
    is_holding: bool
    is_kept: bool
    was_undone: bool = False
    is_trained: bool = False
    is_ahead: bool = False


class SavedLedger(Saved):
    """Saved form of a ledger's accounts."""

    generated: int
    in_flight: int
    buffered: int
    trained: int
    discarded: dict[str, int]


class SavedTurns(Saved):
    """Saved form of :class:`TurnTracker`."""

    engines: list[SavedEngine]
    live_version: int
    next_handle: int
    waiting: list[tuple[int, int]]
    """(rollout id, priority) of each turn that waits for an engine."""
    streams: dict[str, tuple[int, int]]
    media_taken: list[MediaKind] = []


class SavedTasks(Saved):
    """Saved form of :class:`TakenTasks`."""

    offer: int
    counts: list[tuple[int, int]]
    requeued: list[TaskKey]
    is_continued: bool
    first_available_offer: int
    requeued_bodies: list[bytes] = []
    """Bodies of the tasks in ``requeued``, in the same order."""
    episodes: list[tuple[int, str]] = []
    """(iterator, name of its episode function)"""


class SavedTraining(Saved):
    """Saved form of :class:`HandOvers` and :class:`TrainedCounts`."""

    batches: list[SavedBatch]
    count: int
    checkpointed: int
    checkpoint_offer: int
    versions: list[tuple[int, int]]
    trained_batches: int
    trained_rollouts: int
    mixed_version: int
    staleness: list[tuple[int, int]]
    undone: list[tuple[int, ...]] = []
    """Group ids of undone batches, to be handed over again unchanged; oldest batch first."""
    requests: list[WaitingRequest] = []
    offer: tuple[int, int] | None = None
    is_paused: bool = False
    lost: list[tuple[int, str]] = []
    has_lost: bool = False
    emptied: list[int] = []
    newest_trained: int = 0


class SavedCore(Saved):
    """Saved form of a core."""

    trainer_version: int
    are_tasks_exhausted: bool
    is_restoring: bool
    pending_after_resume: list[TaskKey]
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
    oldest_versions_as_of: int
    is_paused: bool
    adaptation: int | None
    """State of an adaptive staleness policy; None for other policies."""
    prompts: list[tuple[bytes, int, float]]
    """(digest, rollouts, total reward) of each prompt with a history."""
    skipped: int
    adapters: dict[str, int] = {}
    failures: list[tuple[FailureKey, int]] = []
    task_records: SavedTaskRecords = SavedTaskRecords()
    trained_adapters: "list[SavedTrainedAdapter]" = []
    is_halted: bool = False
    drops_since_batch: int = 0
    kept_at_limit: int = 0
    agents: tuple[str, ...] = ()


class SavedTrainedAdapter(Saved):
    """Saved form of a trained adapter's core; its turns are saved with the run's."""

    name: str
    rules: dict[str, Any]
    core: SavedCore
    released: int
    live_version: int
    held: dict[str, int]


_encoder = msgspec.msgpack.Encoder(order="deterministic")
_decoder = msgspec.msgpack.Decoder(SavedCore)


def save(core: Core, *, is_replayed: bool = False) -> bytes:
    """Return a core's whole state.

    In a live core, tokens that an episode appended after its rollout's last turn are omitted,
    because no event has reported them yet. ``is_replayed`` is for a core made by replaying events:
    it runs no episodes and can have no unreported tokens. Contexts of such a core are saved whole,
    so that an unexpected token changes the core's digest.
    """
    return _encoder.encode(_saved(core, is_replayed))


def _saved(core: Core, is_replayed: bool) -> SavedCore:
    groups = core.groups
    evaluations = {id(g): g for _, g in groups.running.values() if g.is_evaluation}
    return SavedCore(
        trainer_version=core.trainer_version,
        are_tasks_exhausted=core.are_tasks_exhausted,
        is_restoring=core.is_restoring,
        pending_after_resume=sorted(core.pending_after_resume),
        groups=[_group(group, is_replayed) for group in groups.in_order],
        evaluations=[_group(group, is_replayed) for group in evaluations.values()],
        next_rollout_id=groups.next_rollout_id,
        next_group_id=groups.next_group_id,
        ledger=_ledger(core.ledger),
        evaluation_ledger=_ledger(core.evaluation_ledger),
        discarded_rollouts=dict(core.discarded_rollouts),
        discards=groups.discards.saved(),
        turns=_turns(core) if not core.adapter else SavedTurns([], 0, 0, [], {}),
        tasks=_tasks(core),
        training=_training(core),
        ended=[group.group_id for group in groups.ended],
        oldest_versions_as_of=core.oldest_versions_as_of,
        is_paused=core.is_paused,
        adaptation=core.policy.adaptation,
        prompts=[(d, h.rollouts, h.total_reward) for d, h in core.prompts.histories.items()],
        skipped=core.prompts.skipped,
        adapters=core.adapters,
        failures=sorted(groups.failures.items()),
        trained_adapters=[
            _adapter(core, name, is_replayed) for name in sorted(core.trained_adapters)
        ],
        is_halted=core.is_halted,
        agents=core.agents,
        task_records=core.task_records.saved(),
        drops_since_batch=core.prompts.drops_since_batch,
        kept_at_limit=core.prompts.kept_at_limit,
    )


def _adapter(core: Core, name: str, is_replayed: bool) -> SavedTrainedAdapter:
    trained, versions = core.trained_adapters[name], core.turns.adapter_versions[name]
    return SavedTrainedAdapter(
        name,
        record_of(trained.rules),
        _saved(trained, is_replayed),
        versions.released,
        versions.live_version,
        dict(sorted(versions.held.items())),
    )


def digest(core: Core, *, is_replayed: bool = False) -> str:
    """Return a hash of the bytes that :func:`save` returns."""
    saved = save(core, is_replayed=is_replayed)
    return hashlib.blake2b(saved, digest_size=16).hexdigest()


def _group(group: Group, is_replayed: bool = False) -> SavedGroup:
    rollouts = [_rollout(rollout, is_replayed) for rollout in group.rollouts]
    return SavedGroup(
        group.group_id,
        group.key,
        group.digest,
        group.running,
        rollouts,
        group.oldest_possible_version,
        group.is_retaken,
        group.split_from,
        [*group.sibling_rewards],
        group.body,
        group.is_agents,
        _home_of(group),
    )


def _home_of(group: Group) -> tuple[str, int] | None:
    """Return adapter and id of the group whose running episodes sample a group."""
    if group.home is None or not group.home[1].running:
        return None
    adapter, home = group.home
    return adapter, home.group_id


def _rollout(rollout: Rollout, is_replayed: bool) -> SavedRollout:
    is_live = rollout.state is RolloutState.RUNNING and not is_replayed
    end = rollout.sampled_end if is_live else len(rollout.token_ids)
    return SavedRollout(
        rollout.rollout_id,
        rollout.index,
        rollout.token_ids[:end].tobytes(),
        rollout.logprobs[:end].tobytes(),
        [_turn(turn) for turn in rollout.turns],
        rollout.reward,
        rollout.state,
        rollout.discard_reason,
        rollout.oldest_trainable,
        None if rollout.branch_of is None else rollout.branch_of.rollout_id,
        rollout.fork_reason,
        rollout.retries,
        rollout.pinned_version,
        rollout.home.rollout_id
        if rollout.home is not None and rollout.state is RolloutState.RUNNING
        else None,
    )


def _turn(turn: Turn) -> SavedTurn:
    saved = SavedTurn(
        turn.sampling, turn.start, turn.length, turn.runs, list(turn.prefills), turn.finish_reason
    )
    if turn.attachments is not None:
        saved.attachments = turn.attachments.saved()
    saved.reward = turn.reward
    saved.media = turn.media
    saved.losses, saved.consecutive_losses = turn.losses, turn.consecutive_losses
    return saved


def _ledger(ledger: Ledger) -> SavedLedger:
    return SavedLedger(
        ledger.generated,
        ledger.in_flight,
        ledger.buffered,
        ledger.trained,
        {reason: tokens for reason, tokens in ledger.discarded.items() if tokens},
    )


def _turns(core: Core) -> SavedTurns:
    tracker = core.turns
    return SavedTurns(
        engines=[_engine(name, engine) for name, engine in tracker.engines.items()],
        live_version=tracker.live_version,
        next_handle=tracker.next_handle,
        waiting=[(turn.rollout_id, priority) for turn, priority in tracker.waiting.items()],
        streams=tracker.streams,
        media_taken=sorted(tracker.media_taken),
    )


def _engine(name: str, engine: EngineTurns) -> SavedEngine:
    submissions = [
        SavedSubmission(handle, turn.rollout_id, turn.priority, turn.sampled_before)
        for handle, turn in engine.submissions.items()
    ]
    return SavedEngine(
        name,
        engine.epoch,
        engine.weight_version,
        engine.max_running_turns,
        submissions,
        engine.missing,
        engine.replay_until,
        engine.is_away,
        engine.speed,
        engine.media,
        engine.is_draining,
        engine.is_for_evaluation,
    )


def _tasks(core: Core) -> SavedTasks:
    tasks = core.tasks
    counts = [(offer, count) for offer, count in sorted(tasks.counts.items()) if count]
    requeued = sorted(tasks.requeued)
    return SavedTasks(
        tasks.offer,
        counts,
        requeued,
        tasks.is_continued,
        tasks.first_available_offer,
        [tasks.requeued[key].body for key in requeued],
        sorted(tasks.episodes.items()),
    )


def _training(core: Core) -> SavedTraining:
    handed, trained = core.handed, core.trained
    batches = {batch.number: batch for batch in (*handed.holding, *handed.kept)}
    holding = {batch.number for batch in handed.holding}
    kept = {batch.number for batch in handed.kept}
    return SavedTraining(
        batches=[
            SavedBatch(
                number,
                batch.num_groups,
                batch.trainer_version,
                batch.version,
                [_group(group) for group in batch.groups] if number in kept else [],
                number in holding,
                number in kept,
                batch.was_undone,
                batch.is_trained,
                batch.is_ahead,
            )
            for number, batch in sorted(batches.items())
        ],
        count=handed.count,
        checkpointed=handed.checkpointed,
        checkpoint_offer=handed.checkpoint_offer,
        versions=list(handed.versions),
        trained_batches=trained.batches,
        trained_rollouts=trained.rollouts,
        mixed_version=trained.mixed_version,
        staleness=[(age, count) for age, count in sorted(trained.staleness.items()) if count],
        undone=list(handed.undone),
        requests=list(handed.requests),
        offer=handed.offer,
        is_paused=handed.is_paused,
        lost=list(handed.lost.items()),
        has_lost=handed.has_lost,
        emptied=list(handed.emptied),
        newest_trained=handed.newest_trained,
    )


# ---------------------------------------------------------------- loading


def load(state: bytes, core: Core) -> None:
    """Set a new ``core`` to a saved state.

    Raises:
        ValueError: ``state`` is not a saved state of this version of Tidegate.
    """
    try:
        saved = _decoder.decode(state)
    except msgspec.MsgspecError as error:
        raise ValueError(f"cannot decode a saved state of {len(state)} bytes: {error}") from error
    _load(saved, core)
    _link_agents(saved, core)
    _load_turns(saved.turns, core)


def _load(saved: SavedCore, core: Core) -> None:
    """Set a core to a saved state, all but its turns and engines."""
    core.trainer_version = saved.trainer_version
    core.are_tasks_exhausted = saved.are_tasks_exhausted
    core.is_restoring = saved.is_restoring
    core.adapters.update(saved.adapters)
    _load_groups(saved, core)
    _load_training(saved.training, core)
    pending = set(saved.pending_after_resume)
    for group in core.groups.in_order:
        if group.key in pending:
            core.pending_after_resume.setdefault(group.key, []).append(group)
    core.oldest_versions_as_of, core.is_paused = saved.oldest_versions_as_of, saved.is_paused
    core.prompts.skipped = saved.skipped
    core.prompts.drops_since_batch = saved.drops_since_batch
    core.prompts.kept_at_limit = saved.kept_at_limit
    core.prompts.histories = {d: PromptHistory(n, total) for d, n, total in saved.prompts}
    if saved.adaptation is not None:
        core.policy = core.policy.adapted(saved.adaptation)
    core.tasks.offer = saved.tasks.offer
    core.tasks.counts = Counter(dict(saved.tasks.counts))
    bodies = saved.tasks.requeued_bodies or [b""] * len(saved.tasks.requeued)
    for key, body in zip(saved.tasks.requeued, bodies, strict=True):
        core.tasks.put_back(key, task_of(body), body)
    core.tasks.episodes = dict(saved.tasks.episodes)
    core.tasks.is_continued = saved.tasks.is_continued
    core.tasks.first_available_offer = saved.tasks.first_available_offer
    core.is_halted, core.agents = saved.is_halted, saved.agents
    for each in saved.trained_adapters:
        core.handle(ev.AdapterTrainingStarted(each.name, each.rules))
        versions = core.turns.adapter_versions[each.name]
        versions.released, versions.live_version = each.released, each.live_version
        versions.held = dict(each.held)
        trained = core.trained_adapters[each.name]
        _load(each.core, trained)
        if trained.is_halted or trained.is_paused:
            core.turns.halted.add(each.name)
    running = (group for group in core.groups.in_order if group.running)
    core.task_records.load(saved.task_records, running)


def _link_agents(saved: SavedCore, core: Core) -> None:
    """Restore the links between agents and their homes. An agent's group or rollout is sampled by
    the episodes of another adapter's group, its home."""
    rollouts = {
        row.rollout_id: row
        for each in (core, *core.trained_adapters.values())
        for group in each.groups.in_order
        for row in group.rollouts
    }
    for of_adapter in saved.trained_adapters:
        trained = core.trained_adapters[of_adapter.name]
        by_id = {group.group_id: group for group in trained.groups.in_order}
        for each in of_adapter.core.groups:
            if each.home is None:
                continue
            adapter, home_id = each.home
            groups = core.of(adapter).groups.in_order
            home = next((group for group in groups if group.group_id == home_id), None)
            if home is not None:
                by_id[each.group_id].home = adapter, home
                home.agents[of_adapter.name] = by_id[each.group_id]
            for row in each.rollouts:
                if row.home in rollouts:
                    own, of_home = rollouts[row.rollout_id], rollouts[row.home]
                    own.home = of_home
                    of_home.agents = {**of_home.agents, of_adapter.name: own}


def _load_groups(saved: SavedCore, core: Core) -> None:
    tracker = core.groups
    adapter = core.adapter
    tracker.restore([_loaded_group(group, adapter) for group in saved.groups], ended=saved.ended)
    evaluations = [_loaded_group(group, adapter) for group in saved.evaluations]
    running = [
        (rollout, group)
        for group in (*tracker.in_order, *evaluations)
        for rollout in group.rollouts
        if rollout.state is RolloutState.RUNNING
    ]
    tracker.running = {rollout.rollout_id: (rollout, group) for rollout, group in running}
    if adapter:
        tracker.numbers.tracker_of |= dict.fromkeys(tracker.running, tracker)
    tracker.numbers.next = saved.next_rollout_id
    tracker.next_group_id = saved.next_group_id
    tracker.discarded_rollouts.update(saved.discarded_rollouts)
    tracker.discards.load(saved.discards)
    tracker.failures = Counter(dict(saved.failures))
    for ledger, figures in (
        (core.ledger, saved.ledger),
        (core.evaluation_ledger, saved.evaluation_ledger),
    ):
        ledger.generated = figures.generated
        ledger.in_flight = figures.in_flight
        ledger.buffered = figures.buffered
        ledger.trained = figures.trained
        ledger.discarded.clear()  # the evaluation ledger is loaded once for each trained adapter
        ledger.discarded.update(figures.discarded)


def _loaded_group(saved: SavedGroup, adapter: str) -> Group:
    group = Group(
        saved.group_id,
        task_of(saved.body),
        saved.key,
        saved.digest,
        saved.body,
        is_retaken=saved.is_retaken,
        split_from=saved.split_from,
        sibling_rewards=saved.sibling_rewards,
        is_evaluation=saved.group_id < 0,
        is_agents=saved.is_agents,
    )
    group.running, group.oldest_possible_version = saved.running, saved.oldest_possible_version
    group.rollouts = [_loaded_rollout(rollout, group, adapter) for rollout in saved.rollouts]
    by_id = {rollout.rollout_id: rollout for rollout in group.rollouts}
    for each in saved.rollouts:
        if each.branch_of is not None:
            branch, forked = by_id[each.rollout_id], by_id[each.branch_of]
            branch.branch_of, branch.fork_reason = forked, each.fork_reason
            forked.branches = (*forked.branches, branch)
    return group


def _loaded_rollout(saved: SavedRollout, group: Group, adapter: str) -> Rollout:
    rollout = Rollout(saved.rollout_id, group.group_id, saved.index, adapter)
    rollout.token_ids.frombytes(saved.token_ids)
    rollout.logprobs.frombytes(saved.logprobs)
    rollout.reward = saved.reward
    rollout.state = saved.state
    rollout.discard_reason = saved.discard_reason
    rollout.oldest_trainable = saved.oldest_trainable
    rollout.retries = saved.retries
    rollout.pinned_version = saved.pinned_version
    for turn in saved.turns:
        rollout.turns.append(_loaded_turn(turn, rollout))
    if saved.state is not RolloutState.RUNNING:
        for ended in rollout.turns:
            del ended.rollout
    return rollout


def _loaded_turn(saved: SavedTurn, rollout: Rollout) -> Turn:
    turn = Turn.restored(
        rollout,
        saved.sampling,
        start=saved.start,
        length=saved.length,
        runs=saved.runs,
        prefills=saved.prefills,
        finish_reason=saved.finish_reason,
        media=saved.media,
    )
    if saved.attachments and turn.attachments is None:
        turn.attachments = TurnAttachments(turn.sampling)
    if turn.attachments is not None:
        turn.attachments.restore(saved.attachments, tokens=saved.length)
    turn.reward = saved.reward
    turn.losses, turn.consecutive_losses = saved.losses, saved.consecutive_losses
    return turn


def _load_training(saved: SavedTraining, core: Core) -> None:
    handed, trained = core.handed, core.trained
    for each in saved.batches:
        groups = [_loaded_group(group, core.adapter) for group in each.groups]
        batch = HandedBatch(
            each.number,
            each.num_groups,
            each.trainer_version,
            is_trained=each.is_trained,
            version=each.version,
            groups=groups,
            was_undone=each.was_undone,
            is_ahead=each.is_ahead,
        )
        if each.is_holding:
            handed.holding.append(batch)
        if each.is_kept:
            handed.kept.append(batch)
    handed.count, handed.checkpointed = saved.count, saved.checkpointed
    handed.checkpoint_offer = saved.checkpoint_offer
    handed.versions = deque(saved.versions)
    handed.undone = deque(saved.undone)
    handed.requests = deque(saved.requests)
    handed.offer, handed.is_paused = saved.offer, saved.is_paused
    handed.lost, handed.has_lost = dict(saved.lost), saved.has_lost
    handed.emptied.extend(saved.emptied)
    handed.newest_trained = saved.newest_trained
    trained.batches = saved.trained_batches
    trained.rollouts = saved.trained_rollouts
    trained.mixed_version = saved.mixed_version
    trained.staleness = Counter(dict(saved.staleness))


def _load_turns(saved: SavedTurns, core: Core) -> None:
    tracker = core.turns
    tracker.live_version = saved.live_version
    tracker.next_handle = saved.next_handle
    tracker.streams = dict(saved.streams)
    tracker.media_taken = set(saved.media_taken)
    running = {rollout.rollout_id: rollout for rollout in core.running_rollouts}
    tracker.waiting = {running[rid].turns[-1]: priority for rid, priority in saved.waiting}
    for each in saved.engines:
        engine = EngineTurns(each.weight_version, each.max_running_turns, epoch=each.epoch)
        engine.missing, engine.replay_until = each.missing, each.replay_until
        engine.is_away, engine.speed, engine.media = each.is_away, each.speed, each.media
        engine.is_draining = each.is_draining
        engine.is_for_evaluation = each.is_for_evaluation
        for s in each.submissions:
            turn = running[s.rollout_id].turns[-1]
            turn.priority, turn.sampled_before = s.priority, s.sampled_before
            engine.submissions[s.handle] = turn
            turn.place = (each.name, s.handle)
        tracker.engines[each.name] = engine
    tracker.find_suspect()
