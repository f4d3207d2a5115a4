"""Codec of a core's whole state: MessagePack bytes, saved in the journal and loaded after a crash.

:class:`RunJournal` saves and loads snapshots; replays compare :func:`digest`. The state contains
everything that the next event could depend on. It omits two things. A task that is not plain data
is omitted, because the user's iterator gives it again. Tokens that an episode appended are omitted
until an event reports them. Equal bytes mean equal cores.

A new field is declared at the end of its :class:`Saved` record, with a default. That is all, unless
the field is :data:`Converted`.
"""

import hashlib
from collections import Counter, deque
from collections.abc import Callable
from functools import cache
from typing import Annotated, Any, TypeVar, get_type_hints

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
from tidegate.orchestrator.core.taken_tasks import TakenTasks
from tidegate.orchestrator.core.task_records import SavedTaskRecords
from tidegate.orchestrator.core.token_attachments import TurnAttachments
from tidegate.policies.filters import PromptHistory
from tidegate.policies.just_in_time import AdmissionPace
from tidegate.transport.media import Media, MediaKind
from tidegate.transport.messages import Attachment, SamplingParams

T = TypeVar("T")

CONVERTED = "converted"

Converted = Annotated[T, CONVERTED]
"""Type of a record's field that is not the attribute of its name of the saved object: it has
another form, or is of another object. The functions below save and load it."""


class Saved(msgspec.Struct, array_like=True):
    """Base of saved records. A field that is not :data:`Converted` is the attribute of its name."""

    def restore(self, target: object) -> None:
        """Set the attributes of ``target`` to the fields that are not converted."""
        _functions(type(self))[1](self, target)


SavedKind = TypeVar("SavedKind", bound=Saved)


def record(kind: type[SavedKind]) -> Callable[..., SavedKind]:
    """Return a function that makes the record of an object; it also takes the converted fields, by
    name."""
    return _functions(kind)[0]


@cache
def _functions(kind: type[Saved]) -> tuple[Callable[..., Any], Callable[[Saved, object], None]]:
    """Return the functions that read a record from an object, and set an object to a record.

    They are compiled from the names, as a dataclass's ``__init__`` is. A loop over the names takes
    three times as long, and a run may have a million turns outstanding.
    """
    fields, types = kind.__struct_fields__, get_type_hints(kind, include_extras=True)
    converted = [n for n in fields if CONVERTED in getattr(types[n], "__metadata__", ())]
    values = ", ".join(n if n in converted else f"source.{n}" for n in fields)
    assignments = "; ".join(f"target.{n} = saved.{n}" for n in fields if n not in converted)
    functions: dict[str, Any] = {"kind": kind}
    exec(
        f"def save(source, {', '.join(converted)}): return kind({values})\n"
        f"def restore(saved, target): {assignments}",
        functions,
    )
    return functions["save"], functions["restore"]


class SavedTurn(Saved):
    """Saved form of a turn; its tokens are in its rollout's context."""

    sampling: Any
    """``SamplingParams``; decoded from a map, whose keys may be the names of an older version."""
    start: int
    filed: int
    runs: list[VersionRun]
    prefills: list[TurnPrefill]
    finish_reason: str | None
    attachments: Converted[list[Attachment]] = []
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
    token_ids: Converted[bytes]
    logprobs: Converted[bytes]
    turns: Converted[list[SavedTurn]]
    reward: float | None
    state: RolloutState
    discard_reason: str | None
    oldest_trainable: int
    branch_of: Converted[int | None] = None
    fork_reason: str = ""
    retries: int = 0
    pinned_version: int | None = None
    home: Converted[int | None] = None
    """Id of the rollout whose episode samples this rollout as one of its agents; None for other
    rollouts."""


class SavedGroup(Saved):
    """Saved form of a group and all its rollouts."""

    group_id: int
    key: TaskKey | None
    digest: bytes
    running: int
    rollouts: Converted[list[SavedRollout]]
    oldest_possible_version: int
    is_retaken: bool
    split_from: int | None
    sibling_rewards: list[float]
    body: bytes = b""
    """The task as bytes; empty if it is not plain data."""
    is_agents: bool = False
    home: Converted[tuple[str, int] | None] = None
    """Adapter and id of the group whose episodes sample this group as one of their agents; None for
    other groups."""


class SavedSubmission(Saved):
    """Saved form of a submitted turn, which is always the last turn of its rollout."""

    handle: Converted[int]
    rollout_id: int
    priority: int
    sampled_before: int


class SavedEngine(Saved):
    """Saved form of an engine and of the turns submitted to it."""

    name: Converted[str]
    epoch: int
    weight_version: int
    max_running_turns: int
    submissions: Converted[list[SavedSubmission]]
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
    groups: Converted[list[SavedGroup]]
    is_holding: Converted[bool]
    is_kept: Converted[bool]
    was_undone: bool = False
    is_trained: bool = False
    is_ahead: bool = False


class SavedLedger(Saved):
    """Saved form of a ledger's accounts."""

    generated: int
    in_flight: int
    buffered: int
    trained: int
    discarded: Converted[dict[str, int]]


class SavedTurns(Saved):
    """Saved form of :class:`TurnTracker`."""

    engines: Converted[list[SavedEngine]]
    live_version: int
    next_handle: int
    waiting: Converted[list[tuple[int, int]]]
    """(rollout id, priority) of each turn that waits for an engine."""
    streams: dict[str, tuple[int, int]]
    media_taken: Converted[list[MediaKind]] = []


class SavedTasks(Saved):
    """Saved form of :class:`TakenTasks`."""

    offer: int
    counts: Converted[list[tuple[int, int]]]
    requeued: Converted[list[TaskKey]]
    is_continued: bool
    first_available_offer: int
    requeued_bodies: Converted[list[bytes]] = []
    """Bodies of the tasks in ``requeued``, in the same order."""
    episodes: Converted[list[tuple[int, str]]] = []
    """(iterator, name of its episode function)"""


class SavedTraining(Saved):
    """Saved form of :class:`HandOvers` and :class:`TrainedCounts`."""

    batches: Converted[list[SavedBatch]]
    count: int
    checkpointed: int
    checkpoint_offer: int
    versions: Converted[list[tuple[int, int]]]
    trained_batches: Converted[int]
    trained_rollouts: Converted[int]
    mixed_version: Converted[int]
    staleness: Converted[list[tuple[int, int]]]
    undone: Converted[list[tuple[int, ...]]] = []
    """Group ids of undone batches, to be handed over again unchanged; oldest batch first."""
    requests: Converted[list[WaitingRequest]] = []
    offer: tuple[int, int] | None = None
    is_paused: bool = False
    lost: Converted[list[tuple[int, str]]] = []
    has_lost: bool = False
    emptied: Converted[list[int]] = []
    newest_trained: int = 0


class SavedReuse(SavedTraining):
    """:class:`SavedTraining` of a run with ``max_uses`` above 1. Other runs save the shorter
    record, which is decoded as this one."""

    used: Converted[list[tuple[int, SavedGroup]]] = []
    """(use, group) of each group that may be trained again."""
    uses: Converted[list[tuple[int, int, int]]] = []
    """(batch, group id, use) of each group of a batch that was trained before."""
    bad: Converted[list[int]] = []
    reused_rollouts: Converted[int] = 0
    reused_tokens: Converted[int] = 0


class SavedCore(Saved):
    """Saved form of a core."""

    trainer_version: int
    are_tasks_exhausted: bool
    is_restoring: bool
    pending_after_resume: Converted[list[TaskKey]]
    groups: Converted[list[SavedGroup]]
    evaluations: Converted[list[SavedGroup]]
    next_rollout_id: Converted[int]
    next_group_id: Converted[int]
    ledger: Converted[SavedLedger]
    evaluation_ledger: Converted[SavedLedger]
    discarded_rollouts: Converted[dict[str, int]]
    discards: Converted[SavedDiscards]
    turns: Converted[SavedTurns]
    tasks: Converted[SavedTasks]
    training: Converted[SavedReuse]
    ended: Converted[list[int]]
    """Buffered groups, in the order in which they ended."""
    oldest_versions_as_of: int
    is_paused: bool
    pace: AdmissionPace
    prompts: Converted[list[tuple[bytes, int, float]]]
    """(digest, rollouts, total reward) of each prompt with a history."""
    skipped: Converted[int]
    adapters: Converted[dict[str, int]] = {}
    failures: Converted[list[tuple[FailureKey, int]]] = []
    task_records: Converted[SavedTaskRecords] = SavedTaskRecords()
    trained_adapters: "Converted[list[SavedTrainedAdapter]]" = []
    is_halted: bool = False
    drops_since_batch: Converted[int] = 0
    kept_at_limit: Converted[int] = 0
    agents: tuple[str, ...] = ()


class SavedTrainedAdapter(Saved):
    """Saved form of a trained adapter's core; its turns are saved with the run's."""

    name: Converted[str]
    rules: Converted[dict[str, Any]]
    core: Converted[SavedCore]
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
    groups, prompts = core.groups, core.prompts
    evaluations = {id(g): g for _, g in groups.running.values() if g.is_evaluation}
    return record(SavedCore)(
        core,
        pending_after_resume=sorted(core.pending_after_resume),
        groups=[_group(group, is_replayed) for group in groups.in_order],
        evaluations=[_group(group, is_replayed) for group in evaluations.values()],
        next_rollout_id=groups.next_rollout_id,
        next_group_id=groups.next_group_id,
        ledger=_ledger(core.ledger),
        evaluation_ledger=_ledger(core.evaluation_ledger),
        discarded_rollouts=dict(core.discarded_rollouts),
        adapters=core.adapters,
        discards=groups.discards.saved(),
        turns=_turns(core) if not core.adapter else SavedTurns([], 0, 0, [], {}),
        tasks=_tasks(core),
        training=_training(core),
        ended=[group.group_id for group in groups.ended],
        prompts=[(d, h.rollouts, h.total_reward) for d, h in prompts.histories.items()],
        skipped=prompts.skipped,
        drops_since_batch=prompts.drops_since_batch,
        kept_at_limit=prompts.kept_at_limit,
        failures=sorted(groups.failures.items()),
        task_records=core.task_records.saved(),
        trained_adapters=[
            record(SavedTrainedAdapter)(
                core.turns.adapter_versions[name],
                name=name,
                rules=record_of(trained.rules),
                core=_saved(trained, is_replayed),
            )
            for name, trained in sorted(core.trained_adapters.items())
        ],
    )


def digest(core: Core, *, is_replayed: bool = False) -> str:
    """Return a hash of the bytes that :func:`save` returns."""
    saved = save(core, is_replayed=is_replayed)
    return hashlib.blake2b(saved, digest_size=16).hexdigest()


def _group(group: Group, is_replayed: bool = False) -> SavedGroup:
    return record(SavedGroup)(
        group,
        rollouts=[_rollout(rollout, is_replayed) for rollout in group.rollouts],
        home=_home_of(group),
    )


def _home_of(group: Group) -> tuple[str, int] | None:
    """Return adapter and id of the group whose running episodes sample a group."""
    if group.home is None or not group.home[1].running:
        return None
    adapter, home = group.home
    return adapter, home.group_id


def _rollout(rollout: Rollout, is_replayed: bool) -> SavedRollout:
    is_running = rollout.state is RolloutState.RUNNING
    branch_of, home = rollout.branch_of, rollout.home
    end = rollout.sampled_end if is_running and not is_replayed else None
    return record(SavedRollout)(
        rollout,
        token_ids=rollout.token_ids[:end].tobytes(),
        logprobs=rollout.logprobs[:end].tobytes(),
        turns=[_turn(turn) for turn in rollout.turns],
        branch_of=None if branch_of is None else branch_of.rollout_id,
        home=home.rollout_id if home is not None and is_running else None,
    )


def _turn(turn: Turn) -> SavedTurn:
    attachments = [] if turn.attachments is None else turn.attachments.saved()
    return record(SavedTurn)(turn, attachments=attachments)


def _ledger(ledger: Ledger) -> SavedLedger:
    discarded = {reason: tokens for reason, tokens in ledger.discarded.items() if tokens}
    return record(SavedLedger)(ledger, discarded=discarded)


def _turns(core: Core) -> SavedTurns:
    tracker = core.turns
    return record(SavedTurns)(
        tracker,
        engines=[_engine(name, engine) for name, engine in tracker.engines.items()],
        waiting=[(turn.rollout_id, priority) for turn, priority in tracker.waiting.items()],
        media_taken=sorted(tracker.media_taken),
    )


def _engine(name: str, engine: EngineTurns) -> SavedEngine:
    submissions = [
        record(SavedSubmission)(turn, handle=handle) for handle, turn in engine.submissions.items()
    ]
    return record(SavedEngine)(engine, name=name, submissions=submissions)


def _tasks(core: Core) -> SavedTasks:
    tasks = core.tasks
    requeued = sorted(tasks.requeued)
    return record(SavedTasks)(
        tasks,
        counts=_nonzero(tasks.counts),
        requeued=requeued,
        requeued_bodies=[tasks.requeued[key].body for key in requeued],
        episodes=sorted(tasks.episodes.items()),
    )


def _nonzero(counts: Counter[int]) -> list[tuple[int, int]]:
    return [(key, count) for key, count in sorted(counts.items()) if count]


def _training(core: Core) -> SavedTraining:
    handed, trained = core.handed, core.trained
    batches = {batch.number: batch for batch in (*handed.holding, *handed.kept)}
    holding = {batch.number for batch in handed.holding}
    kept = {batch.number for batch in handed.kept}
    return record(SavedReuse if core.policy.max_uses > 1 else SavedTraining)(
        handed,
        batches=[
            record(SavedBatch)(
                batch,
                groups=[_group(group) for group in batch.groups] if number in kept else [],
                is_holding=number in holding,
                is_kept=number in kept,
            )
            for number, batch in sorted(batches.items())
        ],
        versions=list(handed.versions),
        undone=list(handed.undone),
        requests=list(handed.requests),
        lost=list(handed.lost.items()),
        emptied=list(handed.emptied),
        trained_batches=trained.batches,
        trained_rollouts=trained.rollouts,
        mixed_version=trained.mixed_version,
        staleness=_nonzero(trained.staleness),
        **(_reuse(core) if core.policy.max_uses > 1 else {}),
    )


def _reuse(core: Core) -> dict[str, Any]:
    handed, trained = core.handed, core.trained
    return {
        "used": [(group.use, _group(group)) for group in handed.used.values()],
        "uses": [
            (batch.number, group.group_id, group.use)
            for batch in handed.kept
            for group in batch.groups
            if group.use > 1
        ],
        "bad": sorted(handed.bad),
        "reused_rollouts": trained.reused_rollouts,
        "reused_tokens": trained.reused_tokens,
    }


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
    saved.restore(core)
    core.adapters.update(saved.adapters)
    _load_groups(saved, core)
    _load_training(saved.training, core)
    pending = set(saved.pending_after_resume)
    for group in core.groups.in_order:
        if group.key in pending:
            core.pending_after_resume.setdefault(group.key, []).append(group)
    core.prompts.skipped = saved.skipped
    core.prompts.drops_since_batch = saved.drops_since_batch
    core.prompts.kept_at_limit = saved.kept_at_limit
    core.prompts.histories = {d: PromptHistory(n, total) for d, n, total in saved.prompts}
    _load_tasks(saved.tasks, core.tasks)
    for each in saved.trained_adapters:
        core.handle(ev.AdapterTrainingStarted(each.name, each.rules))
        each.restore(core.turns.adapter_versions[each.name])
        trained = core.trained_adapters[each.name]
        _load(each.core, trained)
        if trained.is_halted or trained.is_paused:
            core.turns.halted.add(each.name)
    running = (group for group in core.groups.in_order if group.running)
    core.task_records.load(saved.task_records, running)


def _load_tasks(saved: SavedTasks, tasks: TakenTasks) -> None:
    saved.restore(tasks)
    tasks.counts = Counter(dict(saved.counts))
    bodies = saved.requeued_bodies or [b""] * len(saved.requeued)
    for key, body in zip(saved.requeued, bodies, strict=True):
        tasks.put_back(key, task_of(body), body)
    tasks.episodes = dict(saved.episodes)


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
        figures.restore(ledger)
        ledger.discarded.clear()  # the evaluation ledger is loaded once for each trained adapter
        ledger.discarded.update(figures.discarded)


def _loaded_group(saved: SavedGroup, adapter: str, *, use: int = 1) -> Group:
    group = Group(saved.group_id, task_of(saved.body), is_evaluation=saved.group_id < 0)
    saved.restore(group)
    group.rollouts = [_loaded_rollout(rollout, group, adapter) for rollout in saved.rollouts]
    by_id = {rollout.rollout_id: rollout for rollout in group.rollouts}
    for rollout in group.rollouts:
        rollout.use = use
    for each in saved.rollouts:
        if each.branch_of is not None:
            branch, forked = by_id[each.rollout_id], by_id[each.branch_of]
            branch.branch_of = forked
            forked.branches = (*forked.branches, branch)
    return group


def _loaded_rollout(saved: SavedRollout, group: Group, adapter: str) -> Rollout:
    rollout = Rollout(saved.rollout_id, group.group_id, saved.index, adapter)
    rollout.token_ids.frombytes(saved.token_ids)
    rollout.logprobs.frombytes(saved.logprobs)
    saved.restore(rollout)
    for turn in saved.turns:
        rollout.turns.append(_loaded_turn(turn, rollout))
    if saved.state is not RolloutState.RUNNING:
        for ended in rollout.turns:
            del ended.rollout
    return rollout


def _loaded_turn(saved: SavedTurn, rollout: Rollout) -> Turn:
    turn = Turn(rollout, saved.sampling, saved.media)
    saved.restore(turn)
    if saved.attachments and turn.attachments is None:
        turn.attachments = TurnAttachments(turn.sampling)
    if turn.attachments is not None:
        turn.attachments.restore(saved.attachments, tokens=saved.filed)
    return turn


def _load_training(saved: SavedReuse, core: Core) -> None:
    handed, trained = core.handed, core.trained
    uses = {(number, group_id): use for number, group_id, use in saved.uses}
    for each in saved.batches:
        batch = HandedBatch(each.number, each.num_groups, each.trainer_version)
        each.restore(batch)
        batch.groups = [
            _loaded_group(group, core.adapter, use=uses.get((each.number, group.group_id), 1))
            for group in each.groups
        ]
        if each.is_holding:
            handed.holding.append(batch)
        if each.is_kept:
            handed.kept.append(batch)
    saved.restore(handed)
    handed.versions, handed.undone = deque(saved.versions), deque(saved.undone)
    handed.requests, handed.lost = deque(saved.requests), dict(saved.lost)
    handed.emptied.extend(saved.emptied)
    handed.bad = set(saved.bad)
    used = [_loaded_group(group, core.adapter, use=use) for use, group in saved.used]
    handed.used = {group.group_id: group for group in used}
    trained.batches = saved.trained_batches
    trained.rollouts = saved.trained_rollouts
    trained.mixed_version = saved.mixed_version
    trained.staleness = Counter(dict(saved.staleness))
    trained.reused_rollouts, trained.reused_tokens = saved.reused_rollouts, saved.reused_tokens


def _load_turns(saved: SavedTurns, core: Core) -> None:
    tracker = core.turns
    saved.restore(tracker)
    tracker.media_taken = set(saved.media_taken)
    running = {rollout.rollout_id: rollout for rollout in core.running_rollouts}
    tracker.waiting = {running[rid].turns[-1]: priority for rid, priority in saved.waiting}
    for each in saved.engines:
        engine = EngineTurns(each.weight_version, each.max_running_turns)
        each.restore(engine)
        for s in each.submissions:
            turn = running[s.rollout_id].turns[-1]
            s.restore(turn)
            engine.submissions[s.handle] = turn
            turn.place = (each.name, s.handle)
        tracker.engines[each.name] = engine
    tracker.find_suspect()
