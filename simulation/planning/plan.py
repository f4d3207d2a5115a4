"""Plan of a run: each choice of settings with its predicted figures, and one recommendation.

Called by ``tidegate plan``; reads nothing and prints nothing.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from tidegate.simulation.planning.closed_forms import predict
from tidegate.simulation.planning.situation import PlanCandidate, PlanWorkload, Prediction
from tidegate.transport.messages import KvPolicy, PauseMode

NEARLY_BEST = 0.98
"""Share of the best throughput that suffices to recommend a smaller staleness bound."""


@dataclass(frozen=True, slots=True)
class Row:
    """One choice and its prediction."""

    varied: str
    """Varied setting: ``max_staleness``, ``pause``, ``split`` or ``batch``."""
    choice: PlanCandidate
    closed: Prediction
    simulated: Prediction | None = None

    @property
    def best(self) -> Prediction:
        """Simulated prediction if there is one, because it assumes less; else the closed form."""
        return self.simulated or self.closed


def staleness_rows(
    situation: PlanWorkload, base: PlanCandidate, bounds: Sequence[int]
) -> list[Row]:
    """Predict the run ``base`` for each staleness bound, in ascending order."""
    choices = [replace(base, max_staleness=bound) for bound in sorted(set(bounds))]
    return [Row("max_staleness", each, predict(situation, each)) for each in choices]


def recommended(rows: Sequence[Row]) -> Row:
    """Return the first row whose throughput is at least ``NEARLY_BEST`` of the best."""
    most = max(row.best.tokens_per_s for row in rows)
    return next(row for row in rows if row.best.tokens_per_s >= NEARLY_BEST * most)


def other_rows(
    situation: PlanWorkload,
    base: PlanCandidate,
    *,
    pauses: Sequence[PauseMode] = (),
    splits: Sequence[tuple[int, int]] = (),
    batches: Sequence[int] = (),
) -> Iterator[Row]:
    """Predict ``base`` with one setting changed: pause mode, engines and trainers, or batch
    size."""
    for mode in pauses:
        kv: tuple[KvPolicy, ...] = ("keep", "recompute") if mode == "keep" else ("keep",)
        for policy in kv:
            yield _row(situation, "pause", replace(base, pause_mode=mode, kv_policy=policy))
    for engines, trainers in splits:
        yield _row(situation, "split", replace(base, engines=engines, trainers=trainers))
    for groups in batches:
        yield _row(situation, "batch", replace(base, groups_per_batch=groups))


def _row(situation: PlanWorkload, varied: str, choice: PlanCandidate) -> Row:
    return Row(varied, choice, predict(situation, choice))


def advice(rows: Sequence[Row]) -> str:
    """Return the recommendation as a sentence, from the rows of :func:`staleness_rows`."""
    row = recommended(rows)
    eta, said = row.choice.max_staleness, row.best
    text = (
        f"max_staleness={eta}: {said.tokens_per_s:.0f} tokens/s, a batch every "
        f"{said.batch_s:.2f} s, mean staleness {said.mean_staleness:.2f}"
    )
    limits = {
        "trainer": "the trainer is what limits, so more staleness only ages samples",
        "engines": "engines are what limits; faster or more of them would help, staleness won't",
        "admission": "the bound itself still limits; try a larger one",
    }
    return f"{text}; {limits[row.closed.limit]}"
