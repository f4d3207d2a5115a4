"""Audit of a recorded run: checks that every token was sampled by the weights that its tag names.

A token's tag names the weight versions that sampled the token and computed the KV before it. The
audit recomputes each token's log-probability from these versions' archived weights, compares it
with the recorded one, and recomputes staleness and counts from the tags. It reads only the run's
directory, and uses none of the code that made the tags.

Runs of Tidegate's own engines on CPUs are replayed by these engines' kernels (:mod:`exact`), which
are fast and, if the engines were deterministic, repeat every bit. Some of their rollouts are also
computed by `transformers` (:mod:`replay`), because an engine's fault can't be found by its own
kernels. Other runs are replayed by `transformers` alone.
"""

import dataclasses
import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tidegate.errors import AuditError, ModelError
from tidegate.observability.audit.bookkeeping import Bookkeeping
from tidegate.observability.audit.replay_plan import (
    EngineBuild,
    PassChange,
    Problem,
    Replay,
    ReplayedAdapter,
    ReplayPlan,
    Segment,
    plan_rollout,
)
from tidegate.observability.audit.rivals import (
    Archived,
    Kind,
    Rival,
    RivalVerdict,
    judge,
    judge_exactly,
    rivals_of,
)
from tidegate.observability.records.recording import QUEUED_WEIGHTS_MAX
from tidegate.observability.records.run_directories import (
    RUN_FILE,
    has_ended,
    is_part,
    process_directories,
    read_run_file,
)
from tidegate.observability.records.run_files import replace_file
from tidegate.observability.records.trajectories import (
    STREAM_FILE,
    TRAJECTORIES_FILE,
    count_trajectories,
    image_path,
    read_trajectories_of_one,
)
from tidegate.observability.records.weight_archive import (
    RebuiltVersions,
    archived_adapter,
    archived_versions,
    archived_weights,
    complete_versions,
)
from tidegate.orchestrator.batches.tasks import to_json
from tidegate.orchestrator.weight_sync.parts import WeightParts
from tidegate.transport.images import ImageReader, open_images

if TYPE_CHECKING:
    from tidegate.observability.audit.exact import EngineReplay

AUDIT_FILE = "audit.json"

TOLERANCE = 2e-4
"""Largest difference of two log-probs (natural log) that agree, for float32. Two float32
forward passes that sum in different orders differed by up to 1.1e-5, over 12,000 tokens of a random
model of 2 layers; a factor of 20 leaves room for deeper models. The report's ``version_power``
measures whether the tolerance still separates neighbouring versions."""

TOLERANCES = {"float32": TOLERANCE, "float16": 0.05, "bfloat16": 0.4}
"""Tolerance by the engine's compute dtype. A replay computes in float32, so the difference is
the engine's rounding: 2**-11 (float16) or 2**-8 (bfloat16) at each step of the sums, and of the
weights. The report's ``version_power`` shows how many wrong tags such a tolerance hides."""

TOLERANCE_RECURRENT = 2e-3
"""As :data:`TOLERANCE`, for models with recurrent layers: transformers' gated delta rule in float32
differs over a whole context by up to 1e-3 from the same rule token by token, and from float64."""

PROBLEMS_SHOWN_MAX = 10

NOT_AUDITED = (
    "not audited: the rewards that episodes gave (advantages are computed from them again), and "
    "attachments other than routed experts and kept tokens"
)

RIVAL_TOKENS = 8
"""Number of a span's tokens under which another history is tried first. Mostly they decide."""

WRONG_TAGS_MAX = 1000
"""Number of wrong tags of each kind that show the power of an exact audit: if it notices all of
them, it misses at most .4 % of all others."""

CHECKED_REPLAYS = 8
"""Number of contexts that `transformers` computes, too, of those that an engine's kernels replay:
enough to find a kernel that is wrong for a model, which is wrong for all of its tokens."""

CHECKED_WRONG_MAX = 0.05
"""Largest share of these contexts' tokens that may disagree with engines that round: in bfloat16 a
log-prob of a pretrained model is off by .02 nats in the median, and seldom by more than
:data:`TOLERANCES`."""

UNNOTICED_MAX = 0.5
"""Largest share of unnoticed tags, of those that change a log-prob, at which an audit agrees. Above
it, that nothing disagrees says little."""

SAME_BITS_MIN = 0.2
"""Share of equal log-probs from which this machine's kernels compute the engines' bits. Where they
differ, some 3 % are equal in float32; where they don't, wrong tags leave those before the first of
them. Tags may be wrong by one version in all tokens, so the other histories count, too."""

SURE_LOGPROB = -1e-3
"""Log-prob above which a token does not count for this: many kernels round it alike."""

UNROUTED_MIN = 16
"""Smallest number of unrouted tokens of a version from which their disagreement is judged."""


@dataclass(frozen=True, slots=True)
class WorstToken:
    """The token with the largest difference between replayed and recorded log-prob."""

    difference: float
    rollout_id: int
    turn: int
    token: int
    """Index of the token in the turn's output."""
    version: int
    recorded: float
    replayed: float


@dataclass(frozen=True, slots=True)
class DetectionPower:
    """Share of wrong tags that an audit would have found, estimated from the run itself.

    The audit compares wrong tags with the recorded ones. If a wrong tag explains the log-probs as
    well as the right one, the audit could not distinguish the two in either direction.
    """

    tags_tried: int = 0
    tags_unnoticed: int = 0
    """Wrong tags for which the log-odds against the right one stay below ``LOG_ODDS_MIN``, because
    both histories give nearly the same log-probs."""
    tags_within_tolerance: int = 0
    """Wrong tags under which all tokens agree within the tolerance; only the log-odds find them."""
    tags_same: int = 0
    """Wrong tags that give every token the same float32 log-prob as the right one, and so cannot be
    found. All of them are among ``tags_unnoticed``."""
    tags: int = 0
    """Number of such wrong tags, of which those that were tried are a random sample."""

    @property
    def unnoticed_share(self) -> float:
        """Share of wrong tags that this audit could not detect."""
        return self.tags_unnoticed / max(1, self.tags_tried)

    @property
    def unnoticed_share_max(self) -> float:
        """Upper limit of the share of all wrong tags, those not tried included, with 97.5 %
        confidence: Wilson's score interval."""
        n, share, z = max(1, self.tags_tried), self.unnoticed_share, 1.96
        centre = share + z * z / (2 * n)
        deviation = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
        return (centre + deviation) / (1 + z * z / n)

    @property
    def missed_share(self) -> float:
        """Share of undetected tags among the wrong tags whose log-probs differ."""
        differing = self.tags_tried - self.tags_same
        return (self.tags_unnoticed - self.tags_same) / max(1, differing)


@dataclass(frozen=True, slots=True)
class AuditReport:
    """Result of an audit: counts of what was checked, and the problems found."""

    tolerance: float
    """The largest tolerance applied; it depends on the engines' compute dtypes. 0 if exact."""
    rollouts: int
    """Number of rollouts that were audited."""
    rollouts_recorded: int
    """Number of rollouts that the run recorded."""
    versions: int
    tokens: int
    """Number of sampled tokens of the audited rollouts."""
    tokens_agreeing: int
    """Number of tokens whose replayed log-prob agrees with the recorded one within the tolerance.
    """
    tokens_unknown: int
    """Tokens whose KV history is tagged unknown; nothing about them can be checked."""
    tokens_unreplayable: int
    """Tokens drawn with a user-defined logits processor or a grammar, or from a context with
    media that can't be replayed; only their tags were checked."""
    tokens_unarchived: int
    """Tokens sampled by weights that were published just before a process was killed and were
    not archived; they can't be checked."""
    tokens_unrouted: int
    """Tokens of mixtures in bfloat16 or float16 that disagree while their routed experts were not
    recorded. Rounding changes which experts are chosen, so single ones of them say nothing; a
    version more than half of whose tokens disagree is a problem."""
    spans: int
    spans_mixed: int
    """Number of spans whose tokens attended to KV of several versions."""
    worst: WorstToken | None
    version_power: DetectionPower
    """Power for spans that are tagged with a neighbouring version."""
    boundary_power: DetectionPower
    """Power for boundaries between two spans of a turn that are off by one token."""
    kv_power: DetectionPower
    """Power for spans on kept KV that are tagged fresh, and spans on recomputed KV tagged kept."""
    problems: tuple[Problem, ...] = field(default=())
    other_dtypes: Mapping[str, str] = field(default_factory=dict)
    """Compute dtype of each engine that did not compute in float32."""
    is_exact: bool = False
    """Whether tokens and log-probs were sampled again by the engine's code and compared by bits."""
    tokens_with_media: int = 0
    """Tokens of ``tokens_unreplayable`` from a context with such media."""
    tokens_checked: int = 0
    """Number of tokens that `transformers` computed, too, if an engine's kernels replayed all."""
    tokens_left_out: int = 0
    """Tokens of weights that the run's setting ``archive_weights`` does not keep; they can't be
    checked."""
    archive_weights: str = "all"
    """The run's setting."""
    versions_left_out: tuple[int, ...] = ()
    """Versions of these tokens, and of the KV that they attended to, that are not archived."""

    @property
    def agrees(self) -> bool:
        """Whether every replayed token agrees with its tag, and there are no problems."""
        accounted = self.tokens_agreeing + self.tokens_unknown
        accounted += self.tokens_unreplayable + self.tokens_unarchived + self.tokens_unrouted
        accounted += self.tokens_left_out
        return not self.problems and accounted == self.tokens

    def lines(self) -> list[str]:
        """Return the result as lines for a person."""
        lines = [
            f"{self.rollouts} of {self.rollouts_recorded} rollouts, {self.spans} spans "
            f"({self.spans_mixed} on mixed KV), {self.versions} weight versions",
            f"{self.tokens_agreeing} of {self.tokens} tokens agree "
            + ("to the bit" if self.is_exact else f"within {self.tolerance:g}"),
        ]
        lines += [
            f"engine {engine!r} computed in {dtype}: its tokens agree within "
            f"{min(self.tolerance, TOLERANCES.get(dtype, TOLERANCE)):g}"
            for engine, dtype in sorted(self.other_dtypes.items())
            if not self.is_exact
        ]
        if self.tokens_checked:
            lines.append(f"{self.tokens_checked} of them were also computed by transformers")
        unreplayed = "tokens were not replayed:"
        notes = (
            (self.tokens_unknown, f"{unreplayed} their KV history is unknown"),
            (
                self.tokens_unreplayable,
                f"{unreplayed} they were drawn with user-defined logits processors or a grammar, "
                "from images, audio or video, or by adapters with versions of their own, before "
                "Tidegate archived these",
            ),
            (
                self.tokens_with_media,
                "of them follow images, audio or video that the run did not read itself or whose "
                "files are not in its record",
            ),
            (
                self.tokens_unarchived,
                f"{unreplayed} a process was killed before it had archived their weights",
            ),
            (
                self.tokens_left_out,
                f"{unreplayed} the run's archive_weights={self.archive_weights!r} did not keep "
                f"{_in_ranges(self.versions_left_out)}; record with archive_weights='all' to audit "
                "all tokens",
            ),
            (
                self.tokens_unrouted,
                "tokens of a rounded mixture disagree, maybe by other experts: record them with "
                "routed_experts=True to audit these tokens",
            ),
        )
        lines += [f"{count} {note}" for count, note in notes if count]
        if self.worst is not None:
            w = self.worst
            lines.append(
                f"worst difference {w.difference:.2e}: rollout {w.rollout_id}, turn {w.turn}, "
                f"token {w.token}, tagged v{w.version}, recorded {w.recorded:.6f}, "
                f"replayed {w.replayed:.6f}"
            )
        for power, what in (
            (self.version_power, "tags one version off"),
            (self.boundary_power, "boundaries one token off"),
            (self.kv_power, "wrong KV histories"),
        ):
            if power.tags_tried:
                lines.append(
                    f"power: of {power.tags_tried} {what}, {power.tags_unnoticed} would not be "
                    f"detected ({power.unnoticed_share:.1%})"
                    + (
                        f", {power.tags_same} of them because they give the same log-probs"
                        if power.tags_same
                        else ""
                    )
                    + (
                        f"; they are a random sample of {power.tags}, of which at most "
                        f"{power.unnoticed_share_max:.1%} would not"
                        if power.tags > power.tags_tried
                        else ""
                    )
                )
        lines += [str(problem) for problem in self.problems[:PROBLEMS_SHOWN_MAX]]
        if (more := len(self.problems) - PROBLEMS_SHOWN_MAX) > 0:
            lines.append(f"... and {more} more")
        lines += [NOT_AUDITED, self.verdict]
        return lines

    @property
    def verdict(self) -> str:
        """The result in a sentence, which says first what the audit could have noticed."""
        power = self.version_power
        unnoticed = f"{power.tags_unnoticed} of {power.tags_tried} tags one version off"
        noticed = f"{unnoticed} would not be noticed"
        if not self.agrees:
            return "DISAGREES"
        if self.tokens and not self.tokens_agreeing:
            return f"nothing replayed: none of {self.tokens} tokens could be checked"
        if not self.has_power:
            return f"cannot tell: {noticed}; {self._remedy}"
        return f"{noticed}: agrees" if power.tags_tried else "agrees"

    @property
    def has_power(self) -> bool:
        """Whether tokens were replayed, and most tags one version off would have been noticed, of
        those that change a log-prob."""
        return bool(self.tokens_agreeing) and self.version_power.missed_share <= UNNOTICED_MAX

    @property
    def _remedy(self) -> str:
        if self.other_dtypes:
            return "record with deterministic=True, and audit on a machine like the engines'"
        return "record longer turns, or more of them"


def audit_run(
    directory: Path,
    *,
    tolerance: float | None = None,
    exact: bool = False,
    rollouts_max: int | None = None,
    wrong_tags_max: int | None = WRONG_TAGS_MAX,
    progress: Callable[[int], None] = lambda version: None,
) -> AuditReport:
    """Replay a run's tokens and compare their log-probabilities with the recorded ones.

    Given a resumed run's directory, the audit covers all of its processes; given one of the
    directory's ``part-N`` directories, only the process that wrote it.

    Args:
        directory: the run's directory.
        tolerance: replaces :data:`TOLERANCES`, in a replay by `transformers` alone.
        exact: refuse runs whose tokens can't be sampled again to the bit: it needs deterministic
            engines, and the kind of processor that they had. Without it such runs are replayed to
            the bit where that is possible.
        rollouts_max: number of rollouts to audit, evenly spaced; all if None.
        wrong_tags_max: number of wrong tags of each kind, chosen at random, by which the power of a
            replay to the bit is estimated; all if None.
        progress: called with each version before it is loaded.

    Raises:
        AuditError: files are missing or damaged, there is nothing to check, or the run can't be
            replayed exactly.
    """
    if exact and tolerance is not None:
        raise AuditError(f"an exact audit has no tolerance; omit tolerance={tolerance:g}")
    if rollouts_max is not None and rollouts_max < 1:
        raise AuditError(f"rollouts_max must be at least 1, got {rollouts_max}")
    tolerance = 0.0 if exact else tolerance
    directory = Path(directory)
    _refuse_without_weights(directory)
    parts = [
        part
        for part in process_directories(directory)
        if part == directory or (part / TRAJECTORIES_FILE).exists() or (part / STREAM_FILE).exists()
    ]
    recorded = sum(count_trajectories(part) for part in parts)
    plans: list[ReplayPlan] = []
    problems: list[Problem] = []
    replays: list[Replay] = []
    verdicts: list[RivalVerdict] = []
    wrong_tags: Counter[Kind] = Counter()
    other_dtypes: dict[str, str] = {}
    unarchived = unreplayable = row = checked = left_out = 0
    versions_left_out: set[int] = set()
    are_exact: list[bool] = []
    rollouts_wanted = min(recorded, rollouts_max or recorded)
    for part in parts:
        bookkeeping = Bookkeeping(part)
        config = _text_config(part)
        vocab_size = None if config is None else config.vocab_size
        float32_tolerance = _float32_tolerance(config)
        images = _images(part)
        plans_of_part: list[ReplayPlan] = []
        for rollout in read_trajectories_of_one(part):
            bookkeeping.check(rollout)
            # Take `rollouts_wanted` rows, evenly spaced: those at which the count due increases.
            if (row + 1) * rollouts_wanted // recorded > row * rollouts_wanted // recorded:
                plans_of_part.append(plan_rollout(rollout, vocab_size, images))
            row += 1
        problems += [problem for plan in plans_of_part for problem in plan.problems]
        problems += bookkeeping.problems()
        planned = [replay for plan in plans_of_part for replay in plan.replays]
        dtypes = _dtypes(part)
        for segment in (segment for replay in planned for segment in replay.segments):
            dtype = dtypes.get(segment.engine, "")
            of_dtype = max(TOLERANCES.get(dtype, TOLERANCE), float32_tolerance)
            segment.tolerance = of_dtype if tolerance is None else tolerance
            segment.is_rounded = TOLERANCES.get(dtype, TOLERANCE) > TOLERANCE
            if segment.is_rounded:
                other_dtypes[segment.engine] = dtype
        archive = _archive_of(part, planned)
        replayable = _replayable(planned, archive, problems)
        unarchived += archive.tokens_lost
        left_out += archive.tokens_left_out
        versions_left_out |= archive.versions_missed
        unreplayable += archive.tokens_unreplayable
        changes = [change for plan in plans_of_part for change in plan.changes]
        plans += plans_of_part
        if not replayable:
            continue
        with closing(RebuiltVersions()) as rebuilt:
            audited = _PartAudit(
                part, archive, rebuilt, replayable, changes, progress, wrong_tags_max
            )
            if tolerance is None or exact:
                verdicts += audited.run(exact=exact)
            else:
                verdicts += audited.by_transformers()
        wrong_tags += audited.wrong_tags
        problems += audited.problems
        checked += audited.tokens_checked
        are_exact.append(audited.is_exact)
        replays += replayable
    tokens = sum(plan.tokens for plan in plans)
    if not tokens:
        adapters = sorted(path.name for path in (directory / "adapters").glob("*"))
        remedy = "give the directory of a run whose engines generated"
        if adapters:
            remedy = f"its trained adapters are in {directory / 'adapters'}: {', '.join(adapters)}"
        raise AuditError(
            f"{directory} has {recorded} rollouts without a sampled token, so there is nothing to "
            f"audit; {remedy}"
        )
    segments = [segment for replay in replays for segment in replay.segments]
    agreeing = [int(_agreeing(segment).sum()) for segment in segments]
    routed = [segment for segment in segments if not segment.is_unrouted]
    problems += _mismatches(routed)
    problems += _wrong_kept_sets(routed)
    problems += _unrouted_mismatches(replays)
    problems += _wrong_routes(replays)
    problems += _nearer_rivals(verdicts)
    return AuditReport(
        tolerance=max((s.tolerance for s in segments), default=tolerance or TOLERANCE),
        rollouts=len(plans),
        rollouts_recorded=recorded,
        versions=len({_weights_of(replay, s) for replay in replays for s in replay.segments}),
        tokens=tokens,
        tokens_agreeing=sum(agreeing),
        tokens_unknown=sum(plan.tokens_unknown for plan in plans),
        tokens_unreplayable=unreplayable + sum(plan.tokens_unreplayable for plan in plans),
        tokens_unarchived=unarchived,
        tokens_with_media=sum(plan.tokens_with_media for plan in plans),
        tokens_unrouted=sum(int((~_agreeing(s)).sum()) for s in segments if s.is_unrouted),
        spans=sum(plan.spans for plan in plans),
        spans_mixed=sum(plan.spans_mixed for plan in plans),
        worst=_worst_token(segments),
        version_power=_power(verdicts, wrong_tags, "version"),
        boundary_power=_power(verdicts, wrong_tags, "boundary"),
        kv_power=_power(verdicts, wrong_tags, "kv"),
        problems=tuple(sorted(problems, key=lambda p: (p.rollout_id, p.turn))),
        other_dtypes=other_dtypes,
        is_exact=bool(are_exact) and all(are_exact),
        tokens_checked=checked,
        tokens_left_out=left_out,
        archive_weights=_archive_setting(directory),
        versions_left_out=tuple(sorted(versions_left_out)),
    )


def _weights_of(replay: Replay, segment: Segment) -> tuple[str, int]:
    """Return what a segment's version is one of, and the version."""
    return replay.adapter.name if replay.adapter.has_own_versions else "", segment.version


class _PartAudit:
    """Replays of one process's records, and of their rivals."""

    def __init__(
        self,
        part: Path,
        archive: "_Archive",
        rebuilt: RebuiltVersions,
        replays: list[Replay],
        changes: list[PassChange],
        progress: Callable[[int], None],
        wrong_tags_max: int | None,
    ) -> None:
        self._part = part
        self._archive = archive
        self._rebuilt = rebuilt
        self._replays = replays
        self._changes = changes
        self._progress = progress
        self._wrong_tags_max = wrong_tags_max
        self.wrong_tags: Counter[Kind] = Counter()
        """Number of rivals of each kind, also of those that were not replayed."""
        self.is_exact = False
        """Whether the replays have the engines' bits."""
        self.tokens_checked = 0
        self.problems: list[Problem] = []
        """What the check by `transformers` found."""

    def run(self, *, exact: bool) -> list[RivalVerdict]:
        """Fill in the log-probs of all replays, and compare rivals with them.

        Raises:
            AuditError: the run can't be replayed; or not exactly, if ``exact``.
        """
        try:
            if (verdicts := self._by_engine(exact=exact)) is not None:
                return verdicts
        except AuditError:
            if exact:
                raise
        return self.by_transformers()

    def by_transformers(self) -> list[RivalVerdict]:
        """As :meth:`run`, by `transformers` alone."""
        for replay in self._replays:
            replay.stages_done = 0
        rivals = self._rivals(None)
        self._by_transformers([*self._replays, *_replays_of(rivals)], in_double=self._is_float32)
        return judge(_judged(rivals), self._segments())

    def _rivals(self, tokens_max: int | None) -> list[Rival]:
        rivals = rivals_of(self._replays, self._changes, self._archive.archived, tokens_max)
        self.wrong_tags = Counter(rival.kind for rival in rivals)
        return rivals

    def _segments(self) -> list[Segment]:
        return [segment for replay in self._replays for segment in replay.segments]

    def _by_engine(self, *, exact: bool) -> list[RivalVerdict] | None:
        """Replay by the engine's kernels; return None if this machine's compute other bits.

        Raises:
            AuditError: no engine of this machine computes as the run's.
        """
        from tidegate.observability.audit.exact import EngineReplay  # imports torch

        build = _engine_build(self._part, self._replays, exact=exact)
        rivals = self._rivals(None)
        engine = EngineReplay(
            [*self._replays, *_replays_of(rivals)],
            self._weights,
            self._progress,
            own_weights=self._own_weights,
            build=build,
        )
        if not build.is_deterministic:
            verdicts = self._by_odds(engine, rivals)
        elif (found := self._by_bits(engine, rivals, exact=exact)) is not None:
            verdicts = found
        else:
            return None
        self._check()
        return verdicts

    def _by_odds(self, engine: "EngineReplay", rivals: Sequence[Rival]) -> list[RivalVerdict]:
        """Replay all by an engine whose log-probs depend on its batches, and compare the odds."""
        from tidegate.observability.audit.replay import FLOAT32_NOISE_FACTOR

        short = self._rivals(RIVAL_TOKENS)
        engine.run([*self._replays, *_replays_of(short)])
        for segment in [*self._segments(), *_copies(short), *_copies(rivals)]:
            segment.noise_factor = FLOAT32_NOISE_FACTOR
        verdicts = judge(short, self._segments())
        # Where the first tokens don't decide, all may.
        undecided = [n for n, verdict in enumerate(verdicts) if not verdict.is_decided]
        if undecided:
            more = [rivals[n] for n in undecided]
            engine.run(_replays_of(more))
            for n, verdict in zip(undecided, judge(more, self._segments()), strict=True):
                verdicts[n] = verdict
        return verdicts

    def _by_bits(
        self, engine: "EngineReplay", rivals: Sequence[Rival], *, exact: bool
    ) -> list[RivalVerdict] | None:
        """Replay all by a deterministic engine, and compare bits; return None if this machine's
        kernels compute other ones.

        A random sample of the rivals shows the power. The others are replayed only for spans that
        disagree, to say which history is the right one.
        """
        tried = _sampled(rivals, self._wrong_tags_max)
        engine.run([*self._replays, *_replays_of(tried)])
        if not exact and not self._has_same_bits(tried):
            return None
        for segment in [*self._segments(), *_copies(rivals)]:
            segment.tolerance = 0.0
        self.is_exact = True
        chosen = {id(rival) for rival in tried}
        others = [
            rival
            for rival in rivals
            if id(rival) not in chosen and not all(_agreeing(p.span).all() for p in rival.parts)
        ]
        engine.run(_replays_of(others))
        return judge_exactly([*tried, *others])

    def _has_same_bits(self, rivals: Sequence[Rival]) -> bool:
        def share(segments: Iterable[Segment]) -> float:
            equal = [
                (each.replayed == each.recorded)[each.recorded < SURE_LOGPROB] for each in segments
            ]
            tokens = np.concatenate(equal) if equal else np.empty(0)
            return float(tokens.mean()) if len(tokens) else 0.0

        of_rivals = share(_copies(rivals))
        # Each span has two rivals, one of which may be right where all tags are wrong.
        return max(share(self._segments()), 2 * of_rivals) >= SAME_BITS_MIN

    def _check(self) -> None:
        """Compute some contexts by `transformers`, and those with routed experts or kept tokens."""
        # Of the oldest version and the newest, because each version takes seconds to load.
        newest = [replay.stages[-1].version for replay in self._replays]
        eligible = [n for n, v in enumerate(newest) if v in (min(newest), max(newest))]
        chosen = {eligible[n * len(eligible) // CHECKED_REPLAYS] for n in range(CHECKED_REPLAYS)}
        copies: list[Replay] = []
        pairs: list[tuple[Segment, Segment]] = []
        for n, replay in enumerate(self._replays):
            has_kept = any(s.sampling.kept_ids is not None for s in replay.segments)
            if n in chosen or has_kept or replay.routes is not None:
                segments = [dataclasses.replace(segment) for segment in replay.segments]
                pairs += zip(replay.segments, segments, strict=True)
                copies.append(dataclasses.replace(replay, segments=segments, stages_done=0))
        for segment, copy in pairs:
            copy.tolerance = TOLERANCES.get(_dtypes(self._part).get(segment.engine, ""), TOLERANCE)
            copy.is_rounded = segment.is_rounded

        def wrong_tokens(*, in_double: bool) -> int:
            for replay in copies:
                replay.stages_done = 0
            self._by_transformers(copies, in_double=in_double)
            return sum(int((~_agreeing(copy)).sum()) for copy in compared())

        def compared() -> list[Segment]:
            return [copy for _, copy in pairs if not (copy.is_rounded and copy.is_unrouted)]

        # float64 takes twice the time, and matters only where float32 is not near enough.
        wrong = wrong_tokens(in_double=False)
        if wrong and self._is_float32:
            wrong = wrong_tokens(in_double=True)
        for segment, copy in pairs:
            # transformers' rounding, though the tokens themselves have to agree to the bit.
            segment.kept_errors = np.where(copy.kept_errors <= copy.tolerance, 0, copy.kept_errors)
        for routes in (copy.routes for copy in copies if copy.routes is not None):
            routes.errors[routes.errors <= pairs[0][1].tolerance] = 0.0
        self.tokens_checked = sum(len(copy.token_ids) for copy in compared())
        allowed = CHECKED_WRONG_MAX if any(copy.is_rounded for _, copy in pairs) else 0.0
        if wrong > allowed * self.tokens_checked:
            message = (
                f"{wrong} of {self.tokens_checked} tokens that transformers computed, too, differ "
                f"from the engines' by more than {pairs[0][1].tolerance:g}"
            )
            self.problems.append(Problem(-1, -1, message))

    @property
    def _is_float32(self) -> bool:
        """Whether all engines computed in float32."""
        dtypes = _dtypes(self._part).values()
        return all(TOLERANCES.get(dtype, TOLERANCE) <= TOLERANCE for dtype in dtypes)

    def _by_transformers(self, replays: list[Replay], *, in_double: bool) -> None:
        from tidegate.observability.audit.replay import replay_all  # imports torch

        replay_all(
            replays,
            self._weights,
            self._progress,
            own_weights=self._own_weights,
            quantization=_quantization(self._part),
            in_double=in_double,
        )

    def _weights(self, version: int) -> Path:
        return self._rebuilt.directory(archived_weights(self._part, version))

    def _own_weights(self, adapter: str, version: int) -> Path:
        return self._archive.adapters[adapter][version]


def _sampled(rivals: Iterable[Rival], rivals_max: int | None) -> list[Rival]:
    """Return the rivals of replays chosen at random, about ``rivals_max`` of each kind."""
    by_kind: defaultdict[Kind, defaultdict[int, list[Rival]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for rival in rivals:
        by_kind[rival.kind][id(rival.replay)].append(rival)
    chosen: list[Rival] = []
    for of_kind in by_kind.values():
        taken: list[Rival] = []
        for of_replay in random.Random(0).sample([*of_kind.values()], len(of_kind)):
            if rivals_max is None or len(taken) < rivals_max:
                taken += of_replay
        chosen += taken
    return chosen


def _copies(rivals: Iterable[Rival]) -> Iterator[Segment]:
    return (part.copy for rival in rivals for part in rival.parts)


def _replays_of(rivals: Iterable[Rival]) -> list[Replay]:
    """Return the replays of rivals, some of which share one."""
    return [*{id(rival.replay): rival.replay for rival in rivals}.values()]


def _judged(rivals: Iterable[Rival]) -> list[Rival]:
    """Return the rivals about which the log-probs say something."""
    return [rival for rival in rivals if not any(p.span.is_unrouted for p in rival.parts)]


def write_audit(directory: Path, report: AuditReport) -> Path:
    """Write the result to audit.json in the run's directory, where the run's report reads it."""
    path = Path(directory) / AUDIT_FILE
    body = {
        **asdict(report),
        "agrees": report.agrees and report.has_power,
        "verdict": report.verdict,
        "lines": report.lines(),
    }
    body["problems"] = [str(problem) for problem in report.problems[:PROBLEMS_SHOWN_MAX]]
    replace_file(path, to_json(body))
    return path


def _quantization(directory: Path) -> str:
    """Return the quantization of the run's engines, which is the same for all of them."""
    run = _run_of(directory)
    try:
        settings = run["settings"] if run else {}
        # Runs recorded before the setting was renamed have it as `quantize`.
        return str(settings.get("quantization", settings.get("quantize")) or "")
    except (KeyError, AttributeError) as error:
        raise AuditError(
            f"{directory / RUN_FILE} lacks {error}, which every version of Tidegate writes: the "
            "file was changed, or is of another program"
        ) from error


def _engine_build(directory: Path, replays: Iterable[Replay], *, exact: bool) -> EngineBuild:
    """Return how the run's engines computed.

    Raises:
        AuditError: they were not all alike, or not Tidegate's own on CPUs; or not deterministic, if
            ``exact``.
    """
    run = _run_of(directory)
    settings = run.get("settings") or {}
    names = {segment.engine for replay in replays for segment in replay.segments}
    recorded = (run.get("statistics") or {}).get("engines") or []
    engines = [engine for engine in recorded if engine.get("name") in names]
    is_deterministic = bool(settings.get("deterministic")) or (
        bool(engines) and all(engine.get("is_deterministic") for engine in engines)
    )
    if exact and not is_deterministic:
        raise AuditError(
            f"{directory} was not recorded with deterministic=True, so other batches give other "
            f"bits; leave --exact out"
        )
    ranks = settings.get("tensor_parallel_size") or 1
    if ranks != 1:
        raise AuditError(
            f"the engines of {directory} had {ranks} ranks, and an exact audit computes with one; "
            f"leave --exact out"
        )
    dtypes = {dtype for engine, dtype in _dtypes(directory).items() if engine in names}
    if len(dtypes) != 1:
        raise AuditError(
            f"the engines of {directory} computed in {sorted(dtypes) or 'an unrecorded dtype'}; an "
            f"exact audit needs one dtype, so leave --exact out"
        )
    builds = {(engine.get("model_code"), engine.get("device")) for engine in engines}
    if not exact and (len(engines) != len(names) or builds != {("tidegate", "cpu")}):
        raise AuditError(f"the engines of {directory} are not known to be Tidegate's on a CPU")
    blocks = {engine.get("block_tokens", 0) for engine in engines} - {0}
    quantization = _quantization(directory)
    return EngineBuild(dtypes.pop(), quantization, max(blocks, default=16), is_deterministic)


def _dtypes(directory: Path) -> dict[str, str]:
    """Return each engine's compute dtype; empty for older runs."""
    dtypes = _run_of(directory).get("dtypes")
    return dict(dtypes) if isinstance(dtypes, dict) else {}


def _run_of(directory: Path) -> dict[str, Any]:
    """Return the process's ``run.json``; empty if it has none."""
    return read_run_file(directory) if (directory / RUN_FILE).exists() else {}


@dataclass(slots=True)
class _Archive:
    """Weights that are available for one process's records."""

    archived: Archived
    lost_versions: frozenset[int]
    """Versions that a process may have published but was killed before archiving."""
    adapters: Mapping[str, Mapping[int, Path]]
    """Directories of the versions of adapters that count their own, by name and version."""
    left_out: frozenset[int]
    """Versions that the run's setting does not keep."""
    tokens_lost: int = 0
    """Tokens of replays that need lost versions."""
    tokens_unreplayable: int = 0
    """Tokens of adapters with versions of their own none of which was archived."""
    tokens_left_out: int = 0
    """Tokens of replays that need versions left out."""
    versions_missed: set[int] = field(default_factory=set)
    """Versions left out that replays need."""


def _refuse_without_weights(directory: Path) -> None:
    if not directory.is_dir():
        raise AuditError(
            f"{directory} is not a directory; give a run's directory, such as runs/latest/async"
        )
    if not archived_versions(directory):
        if (setting := _archive_setting(directory)) == "none":
            raise AuditError(
                f"{directory} was recorded with archive_weights={setting!r}, so it has no weights "
                "to replay its tokens through; record with archive_weights='all'"
            )
        raise AuditError(
            f"{directory / 'weights'} has no weights; an audit replays tokens through the weights "
            "that a run with run_directory archives"
        )


def _text_config(directory: Path) -> Any:
    """Return the configuration of one process's model; None if it has archived no model."""
    from tidegate.observability.audit.archived_model import text_config_of  # imports torch

    for path in archived_versions(directory).values():
        if (path / "config.json").is_file():
            return text_config_of(path)
    return None


def _images(directory: Path) -> ImageReader | None:
    """Return the reader of a process's recorded images; None if the run processed none."""
    kept = image_path(directory, "").resolve()
    try:
        return open_images(archived_weights(directory, 0), [kept]) if kept.is_dir() else None
    except ModelError:  # as of runs that archived no image processor
        return None


def _float32_tolerance(config: Any) -> float:
    """Return the tolerance for engines that computed in float32."""
    from tidegate.engine.execution.block_cache import has_recurrent_layers  # imports torch

    is_recurrent = config is not None and has_recurrent_layers(config)
    return TOLERANCE_RECURRENT if is_recurrent else TOLERANCE


def _archive_of(directory: Path, replays: Iterable[Replay]) -> _Archive:
    """Return the weights of one process's records, and of the adapters that its replays need."""
    parts = complete_versions(directory)
    archived = {(v, ReplayedAdapter(name)) for v in parts for name in ("", *parts[v].adapters)}
    names = {replay.adapter.name for replay in replays if replay.adapter.has_own_versions}
    adapters = {name: archived_adapter(directory, name) for name in names}
    for name in names:
        for version, path in adapters[name].items():
            if (WeightParts.read(path).over or 0) in parts:
                archived.add((version, ReplayedAdapter(name, True)))
    lost = _lost_versions(directory) - parts.keys()
    left_out = _versions_left_out(directory) - parts.keys() - lost
    return _Archive(archived, frozenset(lost), adapters, frozenset(left_out))


def _lost_versions(directory: Path) -> set[int]:
    """Return the versions that killed processes may have published but not archived.

    Versions are archived in order, and a publish waits while more than :data:`QUEUED_WEIGHTS_MAX`
    versions are still to be archived.
    """
    lost: set[int] = set()
    for part in process_directories(directory.parent if is_part(directory) else directory):
        run = _run_of(part)
        if run and not has_ended(run):
            names = (path.name[1:] for path in (part / "weights").glob("v*"))
            newest = max((int(name) for name in names if name.isdecimal()), default=-1)
            step = _archive_step(_archive_setting(part))
            lost |= set(range(newest + 1, newest + 1 + step * (1 + QUEUED_WEIGHTS_MAX)))
    return lost


def _versions_left_out(directory: Path) -> set[int]:
    """Return the versions that the run's setting does not keep, some of which may be archived all
    the same."""
    setting = _archive_setting(directory)
    newest = max(archived_versions(directory), default=-1)
    return set() if setting == "all" else set(range(newest + _archive_step(setting)))


def _archive_setting(directory: Path) -> str:
    """Return the setting ``archive_weights`` of a process; older runs archived all versions."""
    settings = _run_of(directory).get("settings") or {}
    return str(settings.get("archive_weights", "all"))


def _archive_step(setting: str) -> int:
    """Return at which multiples versions are archived."""
    kind, _, count = setting.partition(":")
    return int(count) if kind == "every" and count.isdecimal() else 1


def _in_ranges(versions: Sequence[int]) -> str:
    """Return ascending versions as ``v1 to v3, v5``."""
    ranges: list[tuple[int, int]] = []
    for version in versions:
        if ranges and version == ranges[-1][1] + 1:
            ranges[-1] = ranges[-1][0], version
        else:
            ranges.append((version, version))
    return ", ".join(f"v{a}" if a == b else f"v{a} to v{b}" for a, b in ranges)


def _replayable(replays: list[Replay], archive: _Archive, problems: list[Problem]) -> list[Replay]:
    """Return the replays whose weights are archived.

    A replay whose weights are missing is added to ``problems``, unless a process may have been
    killed before it archived them, or an older one archived no version of the adapter: then the
    replay's tokens are counted in the archive.
    """
    replayable = []
    for replay in replays:
        adapter = replay.adapter
        unknown = {(stage.version, adapter) for stage in replay.stages} - archive.archived
        tokens = sum(len(segment.token_ids) for segment in replay.segments)
        if not unknown:
            replayable.append(replay)
        elif adapter.has_own_versions and not archive.adapters[adapter.name]:
            archive.tokens_unreplayable += tokens
        elif not adapter.has_own_versions and {v for v, _ in unknown} <= archive.lost_versions:
            archive.tokens_lost += tokens
        elif not adapter.has_own_versions and {v for v, _ in unknown} <= archive.left_out:
            archive.tokens_left_out += tokens
            archive.versions_missed |= {v for v, _ in unknown}
        else:
            of = f" with adapter {adapter.name!r}" if adapter.name else ""
            for segment in replay.segments:
                message = (
                    f"tokens from {segment.first_token} on need weights v{min(unknown)[0]}{of}, "
                    f"which are not in the archive"
                )
                problems.append(Problem(segment.rollout_id, segment.turn, message))
    return replayable


def _agreeing(segment: Segment) -> "np.ndarray[tuple[int], np.dtype[np.bool_]]":
    with np.errstate(invalid="ignore"):
        return np.asarray(np.abs(segment.replayed - segment.recorded) <= segment.tolerance)


def _power(
    verdicts: list[RivalVerdict], wrong_tags: Mapping[Kind, int], kind: Kind
) -> DetectionPower:
    tried = [verdict for verdict in verdicts if verdict.rival.kind == kind]
    return DetectionPower(
        len(tried),
        sum(not verdict.is_decided for verdict in tried),
        sum(all(_agreeing(p.copy).all() for p in verdict.rival.parts) for verdict in tried),
        sum(verdict.is_same and not verdict.is_decided for verdict in tried),
        wrong_tags[kind],
    )


def _nearer_rivals(verdicts: list[RivalVerdict]) -> Iterator[Problem]:
    """Yield, for each turn whose recorded history is not the closest to its log-probs, the closest
    one.

    Omits spans that disagree by more than the tolerance, which are reported already, unless a
    bit-exact replay of the rival is equal to the record.
    """
    closest: dict[tuple[int, int], RivalVerdict] = {}
    for verdict in verdicts:
        spans = [part.span for part in verdict.rival.parts]
        is_reported = not all(_agreeing(span).all() for span in spans)
        if verdict.is_wrong and (math.isinf(verdict.log_odds) or not is_reported):
            place = spans[0].rollout_id, spans[0].turn
            closest[place] = max(closest.get(place, verdict), verdict, key=lambda v: v.log_odds)
    for (rollout_id, turn), verdict in closest.items():
        span = verdict.rival.span
        end = span.first_token + len(span.token_ids)
        claim = f"are nearer to {verdict.rival.claim}"
        if math.isinf(verdict.log_odds):
            claim = f"are those of {verdict.rival.claim}, to the bit"
        else:
            claim += f", by odds of 1e{verdict.log_odds / math.log(10):.0f}"
        message = f"tokens [{span.first_token}, {end}) tagged v{span.version} {claim}"
        yield Problem(rollout_id, turn, message)


def _mismatches(segments: Iterable[Segment]) -> list[Problem]:
    problems = []
    for segment in segments:
        mismatched = np.flatnonzero(~_agreeing(segment))
        if len(mismatched):
            first = int(mismatched[0])
            message = (
                f"{len(mismatched)} of {len(segment.token_ids)} tokens tagged v{segment.version} "
                f"do not match its weights, first token {segment.first_token + first}: recorded "
                f"{segment.recorded[first]:.6f}, replayed {segment.replayed[first]:.6f}"
            )
            problems.append(Problem(segment.rollout_id, segment.turn, message))
    return problems


def _unrouted_mismatches(replays: Iterable[Replay]) -> Iterator[Problem]:
    """Yield versions most of whose unrouted tokens disagree: other experts than the replay's are
    chosen for few tokens of the right weights."""
    agreeing: defaultdict[tuple[str, int], list[bool]] = defaultdict(list)
    for replay in replays:
        for segment in replay.segments:
            if segment.is_unrouted:
                agreeing[_weights_of(replay, segment)] += _agreeing(segment).tolist()
    for (adapter, version), of_version in agreeing.items():
        wrong = of_version.count(False)
        if len(of_version) >= UNROUTED_MIN and 2 * wrong > len(of_version):
            of = f" of adapter {adapter!r}" if adapter else ""
            message = (
                f"{wrong} of {len(of_version)} tokens tagged v{version}{of} do not match its "
                f"weights, more than other experts explain"
            )
            yield Problem(-1, -1, message)


def _wrong_kept_sets(segments: Iterable[Segment]) -> list[Problem]:
    """Report tokens whose recorded kept set is not the likeliest tokens, or does not normalise
    their log-prob."""
    problems = []
    for segment in segments:
        wrong = np.flatnonzero(~(segment.kept_errors <= segment.tolerance))
        if len(wrong):
            first = int(wrong[0])
            message = (
                f"{len(wrong)} of {len(segment.token_ids)} tokens tagged v{segment.version} were "
                f"not sampled from their recorded kept tokens, first token "
                f"{segment.first_token + first}, off by {segment.kept_errors[first]:.2e} nats"
            )
            problems.append(Problem(segment.rollout_id, segment.turn, message))
    return problems


def _wrong_routes(replays: Iterable[Replay]) -> list[Problem]:
    """Report positions whose recorded routed experts differ from the choice of the weights that
    computed the positions. Experts whose scores are as close as the tolerance may change places."""
    problems = []
    for replay in replays:
        if replay.routes is None:
            continue
        last = max(replay.segments, key=lambda segment: segment.position)
        wrong = np.flatnonzero(replay.routes.errors > last.tolerance)
        if len(wrong):
            first = int(wrong[0])
            version = next(stage.version for stage in replay.stages if first < stage.end)
            message = (
                f"the recorded routed experts of {len(wrong)} of "
                f"{int(replay.routes.known.sum())} positions are not those that their weights "
                f"choose, first position {first}, computed by v{version}, off by "
                f"{replay.routes.errors[first]:.2e} nats"
            )
            problems.append(Problem(last.rollout_id, last.turn, message))
    return problems


def _worst_token(segments: Iterable[Segment]) -> WorstToken | None:
    worst: WorstToken | None = None
    for segment in segments:
        with np.errstate(invalid="ignore"):
            differences = np.nan_to_num(np.abs(segment.replayed - segment.recorded), nan=np.inf)
        index = int(differences.argmax())
        if worst is None or differences[index] > worst.difference:
            worst = WorstToken(
                difference=float(differences[index]),
                rollout_id=segment.rollout_id,
                turn=segment.turn,
                token=segment.first_token + index,
                version=segment.version,
                recorded=float(segment.recorded[index]),
                replayed=float(segment.replayed[index]),
            )
    return worst
