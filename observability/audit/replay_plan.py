"""Which weights must read which tokens, in what order, to repeat how a rollout was sampled?

Works from the recorded provenance alone, and says where that contradicts itself. Knows no model.

A *pass* goes from one prefill of a turn to the next. Within it, the KV of each context position
was computed once: up to the prefill by the versions that it names, after it by the version that
sampled the token behind that position. Stretches of one version are the *stages* of a replay.
"""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from tidegate.observability.trajectories import RecordedRollout, RecordedTurn
from tidegate.orchestrator.core.provenance import KvRange, TurnPrefill, VersionSpan
from tidegate.transport.messages import KvSpan
from tidegate.transport.sampling import Processor

Purpose = Literal["audit", "other_version", "fresh_kv"]
"""Why a replay is made: to check what was recorded, or to see whether a wrong tag would show:
the neighbouring version in place of the tagged one, or fresh KV in place of a mixed one."""


PROCESSORS_REPLAYED = {"allowed_tokens", "disallowed_tokens", "temperature_schedule"}
"""Their meaning is fixed. What users' own do, and a grammar's library, an audit can't know."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A place where the recorded provenance is wrong or contradicts itself."""

    rollout_id: int
    """-1: of no single rollout."""
    turn: int
    """-1: of the rollout as a whole."""
    message: str

    def __str__(self) -> str:
        if self.rollout_id < 0:
            return self.message
        turn = f", turn {self.turn}" if self.turn >= 0 else ""
        return f"rollout {self.rollout_id}{turn}: {self.message}"


@dataclass(slots=True)
class Segment:
    """Output tokens of one span, whose log-probs a replay computes again."""

    rollout_id: int
    turn: int
    first_token: int
    """Index in the turn's output."""
    version: int
    position: int
    """Index in the context of the first token; its logits come from the position before it."""
    token_ids: npt.NDArray[np.int32]
    """[N]"""
    recorded: npt.NDArray[np.float32]
    """[N], log-probs as the engine reported them."""
    sampling: RecordedTurn
    is_mixed: bool
    """Whether it attended to KV of other versions than its own."""
    engine: str = ""
    """Which engine sampled them."""
    tolerance: float = field(init=False, default=0.0)
    """Largest difference of a log-prob for which they agree, by what the engine computes in."""
    replayed: npt.NDArray[np.float32] = field(init=False)
    """[N], NaN until replayed."""

    def __post_init__(self) -> None:
        self.replayed = np.full(len(self.token_ids), np.nan, dtype=np.float32)


@dataclass(slots=True)
class Replay:
    """One context to be read by one version after another, and the tokens to be looked at."""

    context: npt.NDArray[np.int32]
    """At least as long as the stages."""
    stages: list[KvSpan]
    """Gapless from 0; neighbours differ in version."""
    segments: list[Segment]
    purpose: Purpose = "audit"
    adapter: str = ""
    """What the model computed with; empty: no adapter."""
    stages_done: int = 0


@dataclass(slots=True)
class Plan:
    """What there is to replay of a rollout, and what needs no replay to be seen as wrong."""

    replays: list[Replay] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    tokens: int = 0
    spans: int = 0
    spans_mixed: int = 0
    tokens_unknown: int = 0
    """Of spans that say their KV history is unknown; they can't be replayed."""
    tokens_unreplayable: int = 0
    """Drawn by logit processors that no audit knows, or from a context with media, which it doesn't
    read; their tags are checked, not they."""


def plan_rollout(rollout: RecordedRollout) -> Plan:
    """Say what must be replayed to check every token of a rollout."""
    plan = Plan()
    context = np.asarray(rollout.token_ids, dtype=np.int32)
    logprobs = np.asarray(rollout.logprobs, dtype=np.float32)
    for turn_index, turn in enumerate(rollout.turns):
        plan.tokens += turn.length
        plan.spans += len(turn.spans)
        plan.spans_mixed += sum(span.kv_label.startswith("mixed") for span in turn.spans)
        broken = list(_broken_tables(turn, len(context)))
        if not broken:
            for history, spans in _passes(turn):
                _plan_pass(plan, history, spans, _Place(rollout, turn_index, context, logprobs))
        plan.problems += [Problem(rollout.rollout_id, turn_index, message) for message in broken]
    plan.problems += _unclaimed(rollout, logprobs)
    plan.replays = _merged(plan.replays)
    return plan


@dataclass(frozen=True, slots=True)
class _Place:
    rollout: RecordedRollout
    turn_index: int
    context: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]

    @property
    def turn(self) -> RecordedTurn:
        return self.rollout.turns[self.turn_index]

    @property
    def has_media(self) -> bool:
        """Whether the turn's context has more than tokens."""
        return any(turn.media for turn in self.rollout.turns[: self.turn_index + 1])


def _broken_tables(turn: RecordedTurn, context_tokens: int) -> Iterator[str]:
    """What makes a turn impossible to replay: gaps, overlaps, indices out of range."""
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
                f"the prefill at token {prefill.at} does not say who computed each of the "
                f"{turn.start + prefill.at} positions before it"
            )


def _gap(ranges: Iterable[tuple[int, int]]) -> tuple[int] | None:
    """Where half-open ranges stop being non-empty and gapless from 0, or None."""
    expected = 0
    for start, end in ranges:
        if start != expected or end <= start:
            return (expected,)
        expected = end
    return None


def _passes(turn: RecordedTurn) -> Iterator[tuple[TurnPrefill | None, list[VersionSpan]]]:
    """Give the spans that start in each pass, with the history that the pass began from."""
    # Of several prefills at one token only the last counts: the others sampled nothing.
    by_start = {prefill.at: prefill for prefill in turn.prefills if prefill.at < turn.length}
    moves = {new.start for old, new in itertools.pairwise(turn.spans) if old.engine != new.engine}
    starts = sorted({0, *by_start, *moves})
    for start, end in itertools.pairwise([*starts, turn.length]):
        spans = [span for span in turn.spans if start <= span.start < end]
        if spans:
            yield by_start.get(start), spans


def _plan_pass(
    plan: Plan, history: TurnPrefill | None, spans: list[VersionSpan], place: _Place
) -> None:
    """Check the tags of one pass against its history, and add its replay."""
    turn = place.turn
    rollout_id = place.rollout.rollout_id

    def problem(message: str) -> None:
        plan.problems.append(Problem(rollout_id, place.turn_index, message))

    if history is None:
        plan.tokens_unknown += sum(span.end - span.start for span in spans)
        for span in spans:
            if span.kv is not None:
                problem(f"{_tokens(span)} say {span.kv_label} but no prefill tells who computed it")
        return
    for message in _contradictions(turn, history, spans):
        problem(message)
    if not is_replayable(turn) or place.has_media:
        plan.tokens_unreplayable += sum(span.end - span.start for span in spans)
        return
    stages = _stages(turn, history, spans)
    segments = []
    for span in spans:
        first, last = turn.start + span.start, turn.start + span.end
        # Not from the span's own kv tag: that is what is being checked.
        seen = {stage.version for stage in stages if stage.start < last - 1}
        segments.append(
            Segment(
                rollout_id=rollout_id,
                turn=place.turn_index,
                first_token=span.start,
                version=span.version,
                position=first,
                token_ids=place.context[first:last],
                recorded=place.logprobs[first:last],
                sampling=turn,
                is_mixed=seen != {span.version},
                engine=span.engine,
            )
        )
    adapter = turn.options.adapter if turn.options is not None else ""
    plan.replays.append(Replay(place.context, stages, segments, adapter=adapter))


def is_replayable(turn: RecordedTurn) -> bool:
    """Whether it is known what the turn's logit processors do."""
    processors = turn.options.processors if turn.options is not None else []
    return all(Processor.from_str(text).name in PROCESSORS_REPLAYED for text in processors)


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
            right = VersionSpan(span.version, span.start, span.end, span.engine, expected)
            yield f"{_tokens(span)} say {span.kv_label}, but the KV was {right.kv_label}"
    for prefill in turn.prefills:
        if any(span.start < prefill.at < span.end for span in spans):
            yield f"a span reaches across token {prefill.at}, where the KV was computed anew"


def _tokens(span: VersionSpan) -> str:
    return f"tokens [{span.start}, {span.end}) of v{span.version}"


def _stages(turn: RecordedTurn, history: TurnPrefill, spans: list[VersionSpan]) -> list[KvSpan]:
    """Who computed each position of a pass, as maximal runs. The last token's never was."""
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
    """Sampled tokens that no turn claims, or two do: given ones have a log-prob of exactly 0."""
    claims = np.zeros(len(logprobs), dtype=np.int32)
    for turn in rollout.turns:
        claims[turn.start : turn.start + turn.length] += 1
    problems = []
    if len(orphans := np.flatnonzero((claims == 0) & (logprobs != 0))):
        message = f"{len(orphans)} sampled tokens, from position {orphans[0]}, are in no turn"
        problems.append(Problem(rollout.rollout_id, len(rollout.turns), message))
    if len(twice := np.flatnonzero(claims > 1)):
        message = f"{len(twice)} tokens, from position {twice[0]}, are in two turns"
        problems.append(Problem(rollout.rollout_id, len(rollout.turns), message))
    return problems


def _merged(replays: list[Replay]) -> list[Replay]:
    """Read once what several passes share: attention is causal, so a longer context serves all."""
    kept: list[Replay] = []
    for replay in sorted(replays, key=lambda r: r.stages[-1].end, reverse=True):
        for longer in kept:
            if longer.adapter == replay.adapter and _continues(longer.stages, replay.stages):
                longer.segments += replay.segments
                break
        else:
            kept.append(replay)
    return kept


def _continues(longer: list[KvSpan], shorter: list[KvSpan]) -> bool:
    """Whether the positions of ``shorter`` were computed by the same versions in ``longer``."""
    *head, last = shorter
    count = len(head)
    return (
        longer[:count] == head
        and longer[count].version == last.version
        and longer[count].end >= last.end
    )
