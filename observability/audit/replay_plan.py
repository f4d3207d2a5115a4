"""Plan of an audit's replays: which weights must read which tokens, and in which order.

:func:`audit_run` makes the plan. It is derived from the recorded provenance alone, whose
contradictions it reports as problems; :mod:`replay` carries it out. A *pass* goes from one prefill
of a turn to the next. Within it, the KV of each context position was computed once: up to the
prefill by the versions that it names, after it by the version that sampled the next token. Runs of
one version are the *stages* of a replay.
"""

import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tidegate.errors import ImageRefused
from tidegate.observability.records.trajectories import RecordedRollout, RecordedTurn, image_path
from tidegate.orchestrator.core.provenance import KvRange, TurnPrefill, VersionSpan
from tidegate.orchestrator.core.token_attachments import PositionReport
from tidegate.transport.images import ImageReader
from tidegate.transport.media import Media, Placeholders
from tidegate.transport.messages import KvSpan
from tidegate.transport.sampling import LogitsProcessor

PROCESSORS_REPLAYED = {"allowed_tokens", "disallowed_tokens", "temperature_schedule"}
"""Built-in logits processors; user-defined ones and grammars can't be replayed."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A place where the recorded provenance is wrong or contradicts itself."""

    rollout_id: int
    """-1 if the problem concerns no single rollout."""
    turn: int
    """-1 if the problem concerns the whole rollout."""
    message: str

    def __str__(self) -> str:
        if self.rollout_id < 0:
            return self.message
        turn = f", turn {self.turn}" if self.turn >= 0 else ""
        return f"rollout {self.rollout_id}{turn}: {self.message}"


@dataclass(frozen=True, slots=True, order=True)
class ReplayedAdapter:
    """Adapter that a context was read with, and what its versions count."""

    name: str = ""
    """Empty for none."""
    has_own_versions: bool = False
    """Whether the versions of the context's stages are the adapter's own, not the run's."""


NO_ADAPTER = ReplayedAdapter()


@dataclass(slots=True)
class Segment:
    """Output tokens of one span, whose log-probs a replay computes again."""

    rollout_id: int
    turn: int
    first_token: int
    """Index of the first token in the turn's output."""
    version: int
    """Version of the weights to replay with."""
    position: int
    """Index of the first token in the context; its logits come from the position before it."""
    token_ids: npt.NDArray[np.int32]
    """Sampled tokens of the segment, [N]."""
    recorded: npt.NDArray[np.float32]
    """[N], log-probs as the engine reported them."""
    sampling: RecordedTurn
    """The recorded turn, for its sampling parameters."""
    is_mixed: bool
    """Whether the tokens attended to KV of other versions than their own."""
    engine: str = ""
    """Name of the engine that sampled the tokens."""
    tolerance: float = field(init=False, default=0.0)
    """Largest difference at which two log-probs agree; depends on the engine's compute dtype."""
    is_rounded: bool = field(init=False, default=False)
    """Whether the engine computed in a shorter type than float32."""
    is_unrouted: bool = field(init=False, default=False)
    """Whether a mixture computed the tokens, rounded, and not all of its routed experts are known:
    then it may have chosen others than the replay, which changes a log-prob by nats."""
    replayed: npt.NDArray[np.float32] = field(init=False)
    """Log-probs that the replay computed, [N]; NaN until replayed."""
    noise_factor: float = field(init=False, default=1.0)
    """Factor by which the noise of differences exceeds the engine's own, because of the replay's:
    see :data:`replay.FLOAT32_NOISE_FACTOR`."""
    kept_errors: npt.NDArray[np.float32] = field(init=False)
    """How wrong each token's recorded kept set is, [N], in nats; 0 without a set. Computed by
    :func:`replay.kept_set_error`."""

    def __post_init__(self) -> None:
        self.replayed = np.full(len(self.token_ids), np.nan, dtype=np.float32)
        self.kept_errors = np.zeros(len(self.token_ids), dtype=np.float32)


@dataclass(slots=True)
class RecordedRoutes:
    """Experts to which a pass's positions were routed, as its engine reported them."""

    experts: npt.NDArray[np.uint8 | np.uint16]
    """[P, L, k], of the P positions of a context."""
    known: npt.NDArray[np.bool_]
    """[P], whether the position's experts were reported."""
    errors: npt.NDArray[np.float32] = field(init=False)
    """[P], by how many nats an expert that was not chosen scores above one that is recorded, in the
    worst layer; infinite where no router can choose these experts. Computed by the replay."""

    def __post_init__(self) -> None:
        self.errors = np.zeros(len(self.known), np.float32)

    def are_known_to(self, segment: Segment) -> bool:
        """Whether the experts of all positions that a segment's tokens depend on are known."""
        end = segment.position - 1 + len(segment.token_ids)
        return len(self.known) >= end and bool(self.known[:end].all())

    def joined_with(self, later: "RecordedRoutes | None", at: int) -> "RecordedRoutes":
        """Return these experts up to position ``at``, and those of ``later`` from it on."""
        if later is None or later.experts.shape[1:] != self.experts.shape[1:]:
            return RecordedRoutes(self.experts[:at], self.known[:at])
        return RecordedRoutes(
            np.concatenate([self.experts[:at], later.experts[at:]]),
            np.concatenate([self.known[:at], later.known[at:]]),
        )

    def has(self, other: "RecordedRoutes | None") -> bool:
        """Whether these are the same experts at all positions that both know, and ``other`` knows
        no position that is unknown here."""
        if other is None:
            return False
        positions = other.known
        if len(positions) > len(self.known) or self.experts.shape[1:] != other.experts.shape[1:]:
            return False
        own = self.known[: len(positions)]
        return bool(
            (own | ~positions).all()
            and (self.experts[: len(positions)][positions] == other.experts[positions]).all()
        )


@dataclass(frozen=True, slots=True)
class RecordedImage:
    """An image of a context."""

    media: Media
    """Reference to the recorded file, with its placeholders."""
    reader: ImageReader


@dataclass(slots=True)
class Replay:
    """One context, to be read by the versions of its stages in order, and the tokens whose
    log-probs are needed."""

    context: npt.NDArray[np.int32]
    """Token ids, at least as many as the stages cover."""
    stages: list[KvSpan]
    """Gapless from position 0; neighbouring stages differ in version."""
    segments: list[Segment]
    adapter: ReplayedAdapter = NO_ADAPTER
    routes: RecordedRoutes | None = None
    """Routed experts with which a mixture is replayed; None if none were recorded."""
    stages_done: int = 0
    """Number of stages already computed."""
    images: tuple[RecordedImage, ...] = ()
    """Images of the context, in order."""
    is_rival: bool = False
    """Whether the stages are another history than the recorded one."""

    @property
    def stage(self) -> KvSpan:
        """The stage to compute next."""
        return self.stages[self.stages_done]


@dataclass(frozen=True, slots=True)
class EngineBuild:
    """Settings of an engine on which its bits depend, beside weights and processor."""

    dtype: str
    """Compute dtype, e.g. ``float32``."""
    quantization: str
    """Quantization of the weights; empty for none."""
    block_tokens: int
    """Number of context positions per KV block."""
    is_deterministic: bool
    """Whether a turn has the same bits in any batch, so that a replay has them, too."""


@dataclass(frozen=True, slots=True)
class PassChange:
    """Two consecutive passes of a turn: between them the KV was computed anew."""

    earlier: Replay
    """Its stages end where ``later`` samples its first token from."""
    later: Replay
    last: Segment
    """Last span of the earlier pass."""
    first: Segment
    """First span of the later pass; continues ``last``."""


@dataclass(slots=True)
class ReplayPlan:
    """Replays of one rollout, problems found without a replay, and token counts."""

    replays: list[Replay] = field(default_factory=list)
    changes: list[PassChange] = field(default_factory=list)
    """Boundaries between replays of one turn."""
    problems: list[Problem] = field(default_factory=list)
    tokens: int = 0
    spans: int = 0
    spans_mixed: int = 0
    tokens_unknown: int = 0
    """Tokens of spans with unknown KV history, which can't be replayed."""
    tokens_unreplayable: int = 0
    """Tokens drawn with an unknown logits processor or after media that can't be replayed; only
    their tags are checked."""
    tokens_with_media: int = 0
    """Tokens of ``tokens_unreplayable`` after such media."""


def plan_rollout(
    rollout: RecordedRollout, vocab_size: int | None = None, images: ImageReader | None = None
) -> ReplayPlan:
    """Return what to replay to check every token of a rollout.

    ``images`` reads those of the run's record; with None, turns with images are not replayed.
    A rollout with token ids that no model of ``vocab_size`` tokens has is a problem, and is not
    replayed.
    """
    plan = ReplayPlan()
    context = np.asarray(rollout.token_ids, dtype=np.int32)
    logprobs = np.asarray(rollout.logprobs, dtype=np.float32)
    if broken := list(_broken_columns(rollout, vocab_size)):
        plan.tokens = sum(turn.length for turn in rollout.turns)
        plan.problems += broken
        return plan
    for turn_index, turn in enumerate(rollout.turns):
        plan.tokens += turn.length
        plan.spans += len(turn.spans)
        plan.spans_mixed += sum(span.kv_label.startswith("mixed") for span in turn.spans)
        contradictions = list(_broken_tables(turn, len(context)))
        if not contradictions:
            first = len(plan.replays)
            passes = list(_passes(turn))
            shown = _images_of(rollout.turns[: turn_index + 1], images)
            turn_context = _TurnContext(rollout, turn_index, context, logprobs, shown)
            reported = turn.routed_experts or ()
            first_passes = _first_passes(turn.start, reported, passes)
            for number, (history, spans) in enumerate(passes):
                reports = [
                    report
                    for report, first_pass in zip(reported, first_passes, strict=True)
                    if first_pass <= number
                ]
                _plan_pass(plan, history, spans, reports, turn_context)
            plan.changes += _changes(plan.replays[first:])
            if shown is None:
                plan.tokens_with_media += turn.length
        plan.problems += [
            Problem(rollout.rollout_id, turn_index, message) for message in contradictions
        ]
    plan.problems += _unclaimed(rollout, logprobs)
    plan.replays = _merged(plan.replays)
    return plan


@dataclass(frozen=True, slots=True)
class _TurnContext:
    rollout: RecordedRollout
    turn_index: int
    context: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    images: tuple[RecordedImage, ...] | None
    """Images of the context; None if it has media that can't be replayed."""

    @property
    def turn(self) -> RecordedTurn:
        return self.rollout.turns[self.turn_index]


def _images_of(
    turns: Sequence[RecordedTurn], reader: ImageReader | None
) -> tuple[RecordedImage, ...] | None:
    """Return the images of a context; None if it has media that can't be replayed."""
    found: list[RecordedImage] = []
    for fields in (each for turn in turns if turn.media for each in json.loads(turn.media)):
        if reader is None or "digest" not in fields:
            return None
        place = Placeholders(fields["at"], fields["tokens"], fields["digest"])
        path = image_path(reader.directories[0].parent, place.digest)
        media = Media("image", str(path), place)
        try:
            if reader.read(media).tokens != place.tokens:
                return None
        except ImageRefused:
            return None
        found.append(RecordedImage(media, reader))
    return tuple(found)


def _broken_columns(rollout: RecordedRollout, vocab_size: int | None) -> Iterator[Problem]:
    """Yield a problem for each recorded column of a wrong length, and for token ids outside of the
    vocabulary."""
    if len(rollout.logprobs) != len(rollout.token_ids):
        message = f"it has {len(rollout.logprobs)} log-probs for {len(rollout.token_ids)} tokens"
        yield Problem(rollout.rollout_id, -1, message)

    def outside(token_ids: Iterable[int], turn: int, what: str) -> Iterator[Problem]:
        for position, token_id in enumerate(token_ids):
            if token_id < 0 or (vocab_size is not None and token_id >= vocab_size):
                message = (
                    f"{what} {position} has the id {token_id}, and the model's vocabulary has "
                    f"{vocab_size} tokens"
                )
                yield Problem(rollout.rollout_id, turn, message)
                return

    yield from outside(rollout.token_ids, -1, "token")
    for number, turn in enumerate(rollout.turns):
        if turn.kept_ids is not None:
            if len(turn.kept_ids) != turn.length:
                message = f"it has {len(turn.kept_ids)} kept sets for {turn.length} tokens"
                yield Problem(rollout.rollout_id, number, message)
            yield from outside(itertools.chain(*turn.kept_ids), number, "kept token")
        if turn.options is not None:
            biased = [bias.token_id for bias in turn.options.logit_bias]
            yield from outside(biased, number, "logit bias")
            for text in turn.options.logits_processors:
                if (processor := LogitsProcessor.from_str(text)).name in PROCESSORS_REPLAYED:
                    listed = processor.arguments.get("token_ids", [])
                    yield from outside(listed, number, f"token of {processor.name}")


def _broken_tables(turn: RecordedTurn, context_tokens: int) -> Iterator[str]:
    """Yield what makes a turn impossible to replay: gaps, overlaps, indices out of range."""
    if turn.start < 1 or turn.start + turn.length > context_tokens:
        yield f"its tokens [{turn.start}, {turn.start + turn.length}) are not in the context"
    if gap := _gap((s.start, s.end) for s in turn.spans):
        yield f"its spans leave a gap or overlap at token {gap[0]}"
    covered = turn.spans[-1].end if turn.spans else 0
    if covered != turn.length:
        yield f"its spans cover {covered} tokens but {turn.length} were sampled"
    for prefill in turn.prefills:
        end = prefill.spans[-1].end if prefill.spans else 0
        if end != turn.start + prefill.at or _gap((s.start, s.end) for s in prefill.spans):
            yield (
                f"the prefill at token {prefill.at} does not name the version of each of the "
                f"{turn.start + prefill.at} positions before it"
            )


def _gap(ranges: Iterable[tuple[int, int]]) -> tuple[int] | None:
    """Return where half-open ranges stop being non-empty and gapless from 0; None if they don't."""
    expected = 0
    for start, end in ranges:
        if start != expected or end <= start:
            return (expected,)
        expected = end
    return None


def _passes(turn: RecordedTurn) -> Iterator[tuple[TurnPrefill | None, list[VersionSpan]]]:
    """Yield the spans that start in each pass, with the prefill that the pass began with."""
    # Of several prefills at one token, only the last counts: the others sampled nothing.
    by_start = {prefill.at: prefill for prefill in turn.prefills if prefill.at < turn.length}
    moves = {new.start for old, new in itertools.pairwise(turn.spans) if old.engine != new.engine}
    starts = sorted({0, *by_start, *moves})
    for start, end in itertools.pairwise([*starts, turn.length]):
        spans = [span for span in turn.spans if start <= span.start < end]
        if spans:
            yield by_start.get(start), spans


def _plan_pass(
    plan: ReplayPlan,
    history: TurnPrefill | None,
    spans: list[VersionSpan],
    reports: Sequence[PositionReport],
    turn_context: _TurnContext,
) -> None:
    """Check the tags of one pass against its history, and add its replay."""
    turn = turn_context.turn
    rollout_id = turn_context.rollout.rollout_id

    def problem(message: str) -> None:
        plan.problems.append(Problem(rollout_id, turn_context.turn_index, message))

    if history is None:
        plan.tokens_unknown += sum(span.end - span.start for span in spans)
        for span in spans:
            if span.kv is not None:
                problem(f"{_tokens(span)} say {span.kv_label} but no prefill names its versions")
        return
    for message in _contradictions(turn, history, spans):
        problem(message)
    images = turn_context.images
    if not is_replayable(turn) or images is None:
        plan.tokens_unreplayable += sum(span.end - span.start for span in spans)
        return
    stages = _stages(turn, history, spans)
    segments = []
    for span in spans:
        first, last = turn.start + span.start, turn.start + span.end
        # Not from the span's own kv tag, which is being checked.
        versions = {stage.version for stage in stages if stage.start < last - 1}
        segments.append(
            Segment(
                rollout_id=rollout_id,
                turn=turn_context.turn_index,
                first_token=span.start,
                version=span.version,
                position=first,
                token_ids=turn_context.context[first:last],
                recorded=turn_context.logprobs[first:last],
                sampling=turn,
                is_mixed=versions != {span.version},
                engine=span.engine,
            )
        )
    adapter = NO_ADAPTER
    if (options := turn.options) is not None:
        adapter = ReplayedAdapter(options.adapter, options.adapter_version is not None)
    routes = _joined(reports, stages[-1].end)
    plan.replays.append(
        Replay(
            turn_context.context, stages, segments, adapter=adapter, routes=routes, images=images
        )
    )


def _first_passes(
    turn_start: int,
    reported: Sequence[PositionReport],
    passes: Sequence[tuple[TurnPrefill | None, list[VersionSpan]]],
) -> list[int]:
    """Return the first pass of each of a turn's reports of routed experts.

    An engine reports positions before it samples the next token, and reports them again in each
    pass. A report that agrees with the previous report continues it. So a report ends at a position
    of its last pass, and the next report belongs to a later pass.
    """
    starts = [turn_start + spans[0].start for _, spans in passes]
    first_passes: list[int] = []
    begin = 0
    for report in reported:
        first_passes.append(begin)
        end = report.start + len(report.entries)
        last = max((n for n, start in enumerate(starts) if start <= end), default=0)
        if last >= begin:  # else the engine was lost before the pass sampled a token
            begin = last + 1
    return first_passes


def _joined(reports: Sequence[PositionReport], positions: int) -> RecordedRoutes | None:
    """Return the last report of each of ``positions`` positions; None without any."""
    if not reports:
        return None
    newest = reports[-1].entries
    routes = RecordedRoutes(
        np.zeros((positions, *newest.shape[1:]), newest.dtype), np.zeros(positions, np.bool_)
    )
    for start, experts in reports:
        if experts.shape[1:] == newest.shape[1:] and start < positions:
            part = experts[: positions - start]
            routes.experts[start : start + len(part)] = part
            routes.known[start : start + len(part)] = True
    return routes


def _changes(passes: list[Replay]) -> Iterator[PassChange]:
    """Yield the boundaries between passes of a turn that follow each other without a gap."""
    for earlier, later in itertools.pairwise(passes):
        last, first = earlier.segments[-1], later.segments[0]
        if last.position + len(last.token_ids) == first.position:
            yield PassChange(earlier, later, last, first)


def is_replayable(turn: RecordedTurn) -> bool:
    """Return whether the turn's logits processors can be replayed."""
    processors = turn.options.logits_processors if turn.options is not None else []
    return all(LogitsProcessor.from_str(text).name in PROCESSORS_REPLAYED for text in processors)


def _contradictions(
    turn: RecordedTurn, history: TurnPrefill, spans: list[VersionSpan]
) -> Iterator[str]:
    versions = [stage.version for stage in history.spans]
    first = spans[0]
    if first.start != history.at:
        yield f"no span starts at token {history.at}, where the KV was computed anew"
    elif versions[-1] != first.version:
        yield (
            f"token {history.at} is tagged v{first.version}, but v{versions[-1]} computed the "
            f"position it was sampled from"
        )
    for span in spans:
        versions.append(span.version)
        expected = KvRange(min(versions), max(versions))
        if span.kv != expected:
            corrected = VersionSpan(span.version, span.start, span.end, span.engine, expected)
            yield f"{_tokens(span)} say {span.kv_label}, but the KV was {corrected.kv_label}"
    for prefill in turn.prefills:
        if any(span.start < prefill.at < span.end for span in spans):
            yield f"a span reaches across token {prefill.at}, where the KV was computed anew"


def _tokens(span: VersionSpan) -> str:
    return f"tokens [{span.start}, {span.end}) of v{span.version}"


def _stages(turn: RecordedTurn, history: TurnPrefill, spans: list[VersionSpan]) -> list[KvSpan]:
    """Return which version computed each position, as maximal runs. The last token has no KV."""
    ranges = [(stage.version, stage.end) for stage in history.spans]
    ranges += [(span.version, turn.start + span.end - 1) for span in spans]
    stages: list[KvSpan] = []
    end = 0
    for version, range_end in ranges:
        if range_end <= end:  # one token, sampled from a position of the prefill
            continue
        if stages and stages[-1].version == version:
            stages[-1] = KvSpan(version, stages[-1].start, range_end)
        else:
            stages.append(KvSpan(version, end, range_end))
        end = range_end
    return stages


def _unclaimed(rollout: RecordedRollout, logprobs: npt.NDArray[np.float32]) -> list[Problem]:
    """Report sampled tokens that belong to no turn, or to two. Tokens that the episode appended are
    recognised by their log-prob of exactly 0."""
    claims = np.zeros(len(logprobs), dtype=np.int32)
    for turn in rollout.turns:
        claims[turn.start : turn.start + turn.length] += 1
    problems = []
    if len(orphans := np.flatnonzero((claims == 0) & (logprobs != 0))):
        message = f"{len(orphans)} sampled tokens, from position {orphans[0]}, are in no turn"
        problems.append(Problem(rollout.rollout_id, len(rollout.turns), message))
    if len(duplicates := np.flatnonzero(claims > 1)):
        message = f"{len(duplicates)} tokens, from position {duplicates[0]}, are in two turns"
        problems.append(Problem(rollout.rollout_id, len(rollout.turns), message))
    return problems


def _merged(replays: list[Replay]) -> list[Replay]:
    """Merge passes with a common prefix: by causality, the longest context serves them all."""
    kept: list[Replay] = []
    for replay in sorted(replays, key=lambda r: r.stages[-1].end, reverse=True):
        for longer in kept:
            has_routes = replay.routes is longer.routes or (
                longer.routes is not None and longer.routes.has(replay.routes)
            )
            if (
                has_routes
                and longer.adapter == replay.adapter
                and _continues(longer.stages, replay.stages)
            ):
                longer.segments += replay.segments
                break
        else:
            kept.append(replay)
    return kept


def _continues(longer: list[KvSpan], shorter: list[KvSpan]) -> bool:
    """Return whether ``longer`` has the same versions at all positions of ``shorter``."""
    *head, last = shorter
    count = len(head)
    return (
        longer[:count] == head
        and longer[count].version == last.version
        and longer[count].end >= last.end
    )
