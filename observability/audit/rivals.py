"""Rival histories of recorded spans: other versions, boundaries and KV that a tag could have named.

:func:`audit_run` replays each rival beside the record, and compares which one is closer to the
recorded log-probs. Neighbouring versions differ by less than any tolerance at a small learning
rate; the differences of all tokens of a span together still distinguish them.

The noise of a log-prob, between the engine's sums and the replay's, is taken as
Laplace-distributed, whose tails are heavy enough for the outliers of real engines. A token's
log-prob depends on its logit with the factor 1 - p, so the noise of a token of probability p has
the scale b = s (1 - p). Of N tokens with the recorded log-probs x, the replayed r and the rival's
q, the log-odds of the rival against the record are ::

    sum (|x - r| - |x - q|) / b

in nats. s is estimated as the median of |x - r| / (1 - p) over the engine's tokens, divided by ln
2, which wrong tags on less than half of them do not move. Replays must have less noise than the
engines, or rivals that do not differ would seem closer by chance: see :func:`replay.replay_all`.
"""

import dataclasses
import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from tidegate.observability.audit.replay_plan import (
    PassChange,
    RecordedRoutes,
    Replay,
    ReplayedAdapter,
    Segment,
)
from tidegate.transport.messages import KvSpan

LOG_ODDS_MIN = math.log(1e6)
"""Log-odds, in nats, from which one history counts as closer than another. With odds of a million,
an audit of 10,000 spans has a false alarm in a hundred audits."""

NOISE_MIN = 1e-7
"""Smallest noise of a log-prob, in nats: about the rounding of one float32 log-prob."""

SURE_MIN = 1e-3
"""Smallest probability of another token at which a token counts for the estimate of the noise: the
log-probs of surer ones are rounded to the next float32."""

DIFFERENCE_MAX = 20.0
"""Nats at which a difference is cut off, such as that of a token that a filter would exclude."""

Kind = Literal["version", "boundary", "kv"]
"""Part of the history that a rival changes: the version of a span, the place of a boundary by one
token, or whose KV a span attended to."""

Archived = set[tuple[int, ReplayedAdapter]]
"""Pairs (version, adapter) that can be replayed."""


@dataclass(slots=True)
class Rival:
    """Another history of some tokens of one turn, and its replay."""

    kind: Kind
    claim: str
    """Sentence for a person that is true if the rival history is, such as "v4 has sampled them"."""
    replay: Replay
    """Replay by the rival's stages; rivals about several spans of one context share one."""
    parts: "tuple[_Part, ...]"
    """The tokens that the rival is about."""

    def log_odds(self, noise: float) -> float:
        """Return the log-odds of the rival against the record, in nats; negative for the record.

        ``noise``: s of the module's docstring, of the engine.
        """
        odds = 0.0
        for part in self.parts:
            gain = _differences(part.span)[part.tokens] - _differences(part.copy)
            odds += float((gain / _scale(part.copy, noise)).sum())
        return odds

    @property
    def span(self) -> Segment:
        """The first recorded span that the rival is about."""
        return self.parts[0].span


@dataclass(frozen=True, slots=True)
class _Part:
    """Tokens of a recorded span, and their copy in a rival's replay."""

    span: Segment
    tokens: slice
    copy: Segment


@dataclass(frozen=True, slots=True)
class RivalVerdict:
    """Comparison of one rival with the record."""

    rival: Rival
    log_odds: float
    """Log-odds of the rival against the record, in nats."""

    @property
    def is_decided(self) -> bool:
        """Whether either history is closer by :data:`LOG_ODDS_MIN`."""
        return abs(self.log_odds) >= LOG_ODDS_MIN

    @property
    def is_same(self) -> bool:
        """Whether both histories give every token the same float32 log-prob, so that no audit of
        log-probs can distinguish them."""
        return all(np.array_equal(p.copy.replayed, _of_span(p)) for p in self.rival.parts)

    @property
    def is_wrong(self) -> bool:
        """Whether the rival is closer, so that the tag is wrong."""
        return self.log_odds >= LOG_ODDS_MIN


def judge(rivals: Iterable[Rival], segments: Iterable[Segment]) -> list[RivalVerdict]:
    """Compare replayed rivals with the replayed record, relative to the noise of each engine's
    tokens.

    See :func:`judge_exactly` for replays that are equal to the record to the bit.
    """
    by_engine: defaultdict[str, list[Segment]] = defaultdict(list)
    for segment in segments:
        by_engine[segment.engine].append(segment)
    noise = {engine: _noise(of_engine) for engine, of_engine in by_engine.items()}
    return [RivalVerdict(rival, rival.log_odds(noise[rival.span.engine])) for rival in rivals]


def _noise(segments: Sequence[Segment]) -> float:
    """Return the noise s of the logits of one engine's tokens."""
    differences = np.concatenate([_differences(each) for each in segments])
    others = np.concatenate([_others(each) for each in segments])
    counted = others >= SURE_MIN
    if not counted.any():
        return NOISE_MIN
    return max(NOISE_MIN, float(np.median(differences[counted] / others[counted])) / math.log(2))


def _scale(segment: Segment, noise: float) -> npt.NDArray[np.float64]:
    """Return the scale b of each token's noise, at least that of rounding to float32. [N]"""
    return np.maximum(noise * segment.noise_factor * _others(segment), NOISE_MIN)


def _others(segment: Segment) -> npt.NDArray[np.float64]:
    """Return the probability of all other tokens than the sampled one, 1 - p. [N]"""
    return -np.expm1(np.minimum(segment.recorded.astype(np.float64), 0.0))


def judge_exactly(rivals: Iterable[Rival]) -> list[RivalVerdict]:
    """Compare bit-exact replays of rivals and record: infinite log-odds for the only exact one."""
    verdicts = []
    for rival in rivals:
        is_recorded = all(np.array_equal(p.copy.recorded, _of_span(p)) for p in rival.parts)
        is_rival = all(np.array_equal(p.copy.recorded, p.copy.replayed) for p in rival.parts)
        odds = 0.0 if is_recorded == is_rival else math.inf if is_rival else -math.inf
        verdicts.append(RivalVerdict(rival, odds))
    return verdicts


def _of_span(part: _Part) -> npt.NDArray[np.float32]:
    """Return what the record's own replay gives for the tokens that a rival is about. [N]"""
    return part.span.replayed[part.tokens]


def _differences(segment: Segment) -> npt.NDArray[np.float64]:
    """Return each token's difference between replayed and recorded log-prob, in nats. [N]"""
    with np.errstate(invalid="ignore"):
        differences = np.abs(segment.replayed - segment.recorded)
    clipped: npt.NDArray[np.float64] = np.minimum(
        np.nan_to_num(differences.astype(np.float64), nan=DIFFERENCE_MAX), DIFFERENCE_MAX
    )
    return clipped


def rivals_of(
    replays: Iterable[Replay],
    changes: Iterable[PassChange],
    archived: Archived,
    tokens_max: int | None = None,
) -> list[Rival]:
    """Return the rivals of planned replays whose weights are archived.

    Args:
        replays: the record's own replays, with archived weights.
        changes: consecutive passes of turns, whose boundary is a recompute.
        archived: weights that can be replayed.
        tokens_max: number of each span's first tokens that a rival is about; all if None.
    """
    found: list[Rival] = []
    for replay in replays:
        found += _other_versions(replay, archived, tokens_max)
        found += _moved_boundaries(replay, tokens_max)
        found += _fresh_kv(replay, tokens_max)
    for change in changes:
        stages = [*change.earlier.stages, *change.later.stages]
        if {(stage.version, change.later.adapter) for stage in stages} <= archived:
            found += _recomputes(change, tokens_max)
    return found


def _other_versions(replay: Replay, archived: Archived, tokens_max: int | None) -> Iterator[Rival]:
    """Yield each span under the version before and after its own."""
    for number, stage in enumerate(replay.stages):
        spans = [each for each in replay.segments if stage.start < each.position <= stage.end]
        for other in (stage.version - 1, stage.version + 1):
            if spans and (other, replay.adapter) in archived:
                stages = [*replay.stages[:number], KvSpan(other, stage.start, stage.end)]
                parts = [_part(span, slice(tokens_max)) for span in spans]
                shared = _replay(replay, stages, parts, replay.routes)
                for part in parts:  # one by one, because one turn alone may be tagged wrong
                    yield Rival("version", f"v{other}", shared, (part,))


def _moved_boundaries(replay: Replay, tokens_max: int | None) -> Iterator[Rival]:
    """Yield spans between which KV was kept, with their boundary one token earlier and later."""
    for number, (old, new) in enumerate(itertools.pairwise(replay.stages)):
        ended = [e for e in replay.segments if e.position - 1 + len(e.token_ids) == old.end]
        begun = [e for e in replay.segments if e.position - 1 == old.end]
        for (last, first), shift in itertools.product(zip(ended, begun, strict=False), (-1, 1)):
            boundary = old.end + shift
            if not old.start < boundary < new.end:
                continue
            stages = [
                *replay.stages[:number],
                KvSpan(old.version, old.start, boundary),
                KvSpan(new.version, boundary, new.end),
            ]
            parts = [_part(first, slice(tokens_max))]
            if shift < 0:
                parts.insert(0, _part(last, slice(len(last.token_ids) - 1, None)))
            claim = _moved(first, shift)
            yield Rival(
                "boundary", claim, _replay(replay, stages, parts, replay.routes), tuple(parts)
            )


def _fresh_kv(replay: Replay, tokens_max: int | None) -> Iterator[Rival]:
    """Yield spans on KV of other versions as if their own had computed all of it."""
    for span in replay.segments:
        if span.is_mixed:
            stages = [KvSpan(span.version, 0, span.position - 1 + len(span.token_ids))]
            part = _part(span, slice(tokens_max))
            yield Rival("kv", "fresh KV", _replay(replay, stages, [part], replay.routes), (part,))


def _recomputes(change: PassChange, tokens_max: int | None) -> Iterator[Rival]:
    """Yield a recompute that did not happen, or that happened one token earlier or later."""
    earlier, later = change.earlier.stages, change.later.stages
    last, first = change.last, change.first
    at = first.position - 1  # the first position that the later pass samples from
    whole, one = slice(tokens_max), slice(0, 1)
    own_end = at + len(first.token_ids)
    claims: list[tuple[Kind, str, _Part, list[KvSpan], list[KvSpan]]] = [
        (
            "kv",
            "KV kept from before the recompute",
            _part(first, whole),
            [*_until(earlier, at), KvSpan(first.version, at, own_end)],
            later,
        ),
        (
            "boundary",
            _moved(first, 1),
            _part(first, one),
            [*_until(earlier, at), KvSpan(earlier[-1].version, at, at + 1)],
            later,
        ),
    ]
    if at > 1:
        tail = _part(last, slice(len(last.token_ids) - 1, None))
        claims.append(("boundary", _moved(first, -1), tail, later, earlier))
    for kind, claim, part, stages, recorded in claims:
        end = part.copy.position - 1 + len(part.copy.token_ids)
        if _until(stages, end) != _until(recorded, end):
            before, after = change.earlier.routes, change.later.routes
            if stages is not later:
                after = None if before is None else before.joined_with(after, at)
            yield Rival(kind, claim, _replay(change.later, stages, [part], after), (part,))


def _moved(first: Segment, shift: int) -> str:
    return f"a boundary at token {first.first_token + shift} in place of {first.first_token}"


def _until(stages: Sequence[KvSpan], end: int) -> list[KvSpan]:
    """Return the stages of positions ``[0, end)``, neighbours of one version joined."""
    joined: list[KvSpan] = []
    for stage in stages:
        if stage.start >= end:
            break
        start = stage.start
        if joined and joined[-1].version == stage.version:
            start = joined.pop().start
        joined.append(KvSpan(stage.version, start, min(stage.end, end)))
    return joined


def _replay(
    recorded: Replay,
    stages: Sequence[KvSpan],
    parts: Sequence[_Part],
    routes: RecordedRoutes | None,
) -> Replay:
    """Make a replay of a recorded context by other stages, as far as its parts need them."""
    copies = [each.copy for each in parts]
    end = max(copy.position - 1 + len(copy.token_ids) for copy in copies)
    return Replay(
        recorded.context,
        _until(stages, end),
        copies,
        recorded.adapter,
        None if routes is None else RecordedRoutes(routes.experts, routes.known),
        images=recorded.images,
        is_rival=True,
    )


def _part(span: Segment, tokens: slice) -> _Part:
    """Copy some tokens of a recorded span, to be replayed by other stages."""
    first = tokens.start or 0
    copy = dataclasses.replace(
        span,
        first_token=span.first_token + first,
        position=span.position + first,
        token_ids=span.token_ids[tokens],
        recorded=span.recorded[tokens],
    )
    copy.tolerance = span.tolerance
    return _Part(span, tokens, copy)
