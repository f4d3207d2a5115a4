"""Samples one token per row from a step's logits, with its log-prob and requested details.

Called by the runners. Rows without options beyond temperature, top-k and top-p take a fast path.
Every draw uses the row's own counter-based random number, whatever else is in the batch.

Letters in shapes: S sampling rows, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from tidegate.engine.sampling import seen_tokens
from tidegate.engine.sampling.options import RowOptions
from tidegate.engine.sampling.scoring import RowScore
from tidegate.kernels.native import Native
from tidegate.kernels.penalties import ban_, bias_, penalize_
from tidegate.kernels.sampling import (
    TokenDistribution,
    sample,
    weigh,
    weights_of,
)
from tidegate.kernels.uniforms import uniforms

SEED_MASK = 2**64 - 1
"""Seeds may be any int; the generator takes 64 bits."""


@dataclass(slots=True)
class RowSampling:
    """How a row's next token is sampled; fields as in ``SamplingParams``."""

    temperature: float
    top_k: int
    top_p: float
    seed: int
    index: int
    """Index of the random number within the seed's stream: the number of tokens sampled before."""
    options: RowOptions | None = None
    """Uncommon options; None for most turns."""


@dataclass(frozen=True, slots=True)
class RowDetails:
    """Details of a row's token, encoded as in ``messages.TokenDetails``."""

    raw_logprobs: bytes
    top_ids: bytes
    top_logprobs: bytes

    @property
    def is_sound(self) -> bool:
        """Whether no value is NaN; excluded tokens have -inf."""
        told = np.frombuffer(self.raw_logprobs + self.top_logprobs, np.float32)
        return not np.isnan(told).any()


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Results of one step: a token per sampling row, in the order of the rows, and scores."""

    token_ids: npt.NDArray[np.int32]
    """[S]"""
    logprobs: npt.NDArray[np.float32]
    """[S], natural log, of the distribution sampled from; of the unscaled one at temperature 0."""
    details: Mapping[int, RowDetails] = field(default_factory=dict)
    """Details by sampling row."""
    failures: Mapping[int, str] = field(default_factory=dict)
    """Reason for each sampling row without a sample; its columns' values are meaningless."""
    scores: Sequence[RowScore] = ()
    """Scores of the scored rows, in their order."""


@dataclass(frozen=True, slots=True)
class _Columns:
    temperature: npt.NDArray[np.float32]
    top_k: npt.NDArray[np.int64]
    top_p: npt.NDArray[np.float32]
    uniforms: npt.NDArray[np.float64]


def sample_rows(
    logits: torch.Tensor, sampling: Sequence[RowSampling], native: Native | None = None
) -> StepOutput:
    """Sample one token per row of ``logits`` [S, V], float32, which may be overwritten.

    With ``native``, rows whose only option is a temperature are sampled by compiled code.
    """
    if native is None:
        return _sample(logits, sampling)
    others = [row for row, one in enumerate(sampling) if not _is_plain(one)]
    if not others:
        return StepOutput(*_draw_plain(logits, sampling, native))
    if len(others) == len(sampling):
        return _sample(logits, sampling)
    return _sample_parts(logits, sampling, native, [others])


def sample_apart(
    logits: torch.Tensor, sampling: Sequence[RowSampling], native: Native
) -> StepOutput:
    """Like :func:`sample_rows`, but a row gets the same bits whatever other rows are in the batch.

    A row's own options choose the code. Compiled code computes row by row; torch gets one row at a
    time, because its results may depend on a row's alignment in memory.
    """
    others = [[row] for row, one in enumerate(sampling) if not _is_plain(one)]
    return _sample_parts(logits, sampling, native, others)


def _sample_parts(
    logits: torch.Tensor,
    sampling: Sequence[RowSampling],
    native: Native,
    others: Sequence[Sequence[int]],
) -> StepOutput:
    """Sample plain rows with ``native``, and each group of ``others`` in one torch call."""
    token_ids = np.empty(len(sampling), np.int32)
    logprobs = np.empty(len(sampling), np.float32)
    details: dict[int, RowDetails] = {}
    failures: dict[int, str] = {}
    plain = [row for row, one in enumerate(sampling) if _is_plain(one)]
    if plain:
        mine = logits if len(plain) == len(logits) else logits[plain]
        token_ids[plain], logprobs[plain] = _draw_plain(mine, [sampling[r] for r in plain], native)
    for part in others:
        output = _sample(logits[part], [sampling[row] for row in part])
        token_ids[part], logprobs[part] = output.token_ids, output.logprobs
        details |= {part[row]: told for row, told in output.details.items()}
        failures |= {part[row]: why for row, why in output.failures.items()}
    return StepOutput(token_ids, logprobs, details, failures)


def _sample(logits: torch.Tensor, sampling: Sequence[RowSampling]) -> StepOutput:
    columns = _columns(sampling)
    options = {row: one.options for row, one in enumerate(sampling) if one.options is not None}
    if options:
        return _sample_with_options(logits, columns, sampling, options)
    token_ids, logprobs = sample(
        logits, columns.temperature, columns.top_k, columns.top_p, columns.uniforms
    )
    return StepOutput(token_ids.numpy().astype(np.int32), logprobs.numpy())


def _is_plain(one: RowSampling) -> bool:
    return one.options is None and one.top_k == 0 and one.top_p == 1


def _draw_plain(
    logits: torch.Tensor, sampling: Sequence[RowSampling], native: Native
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    temperatures = np.array([one.temperature for one in sampling], np.float32)
    return native.draw(logits.contiguous(), temperatures, *random_numbers(sampling))


def random_numbers(
    sampling: Sequence[RowSampling],
) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    """Return each row's RNG seed and its draw index."""
    seeds = np.array([one.seed & SEED_MASK for one in sampling], np.uint64)
    return seeds, np.array([one.index for one in sampling], np.uint64)


def _columns(sampling: Sequence[RowSampling]) -> _Columns:
    return _Columns(
        np.array([one.temperature for one in sampling], np.float32),
        np.array([one.top_k for one in sampling], np.int64),
        np.array([one.top_p for one in sampling], np.float32),
        uniforms(*random_numbers(sampling)),
    )


def _sample_with_options(
    logits: torch.Tensor,
    columns: _Columns,
    sampling: Sequence[RowSampling],
    options: Mapping[int, RowOptions],
) -> StepOutput:
    logits = logits.contiguous()  # edits use flat indices
    raw_rows = [row for row, one in options.items() if one.raw_logprobs]
    raw = logits[raw_rows]  # a copy, because the logits are edited below
    failures = _edit(logits, sampling, options)
    min_p = np.zeros(len(logits), np.float32)
    for row, one in options.items():
        min_p[row] = one.min_p
    weighed = weigh(
        logits, columns.temperature, columns.top_k, columns.top_p, min_p if min_p.any() else None
    )
    chosen = weighed.draw(columns.temperature, columns.uniforms)
    raw_told: dict[int, bytes] = {}
    if raw_rows:
        values = weights_of(raw).logprobs(chosen[raw_rows][:, None]).numpy()
        raw_told = {row: value.tobytes() for row, value in zip(raw_rows, values, strict=True)}
    return StepOutput(
        chosen.numpy().astype(np.int32),
        weighed.logprobs(chosen[:, None]).squeeze(-1).numpy(),
        _details(weighed, options, raw_told),
        failures,
    )


def _edit(
    logits: torch.Tensor, sampling: Sequence[RowSampling], options: Mapping[int, RowOptions]
) -> dict[int, str]:
    """Apply bias, bans, penalties and processors in place; return the rows that
    failed, with reasons."""
    vocab_size = logits.shape[-1]
    biased = {row: one for row, one in options.items() if len(one.bias_ids)}
    if biased:
        places = np.concatenate([row * vocab_size + one.bias_ids for row, one in biased.items()])
        biases = np.concatenate([one.biases for one in biased.values()])
        bias_(logits, torch.from_numpy(places), torch.from_numpy(biases))
    young = [row for row, one in options.items() if sampling[row].index < one.min_tokens]
    if young:
        places = np.concatenate([row * vocab_size + options[row].banned for row in young])
        ban_(logits, torch.from_numpy(places))
    seen = {row: one.seen for row, one in options.items() if one.seen is not None}
    if seen:
        penalize_(logits, seen_tokens.batched(list(seen), list(seen.values()), vocab_size))
    failures: dict[int, str] = {}
    for row, one in options.items():
        if one.processors and (why := one.process(logits[row], sampling[row].index)) is not None:
            failures[row] = why
            logits[row] = 0.0  # the unused sample must not be drawn from NaN
    return failures


def _details(
    weighed: TokenDistribution, options: Mapping[int, RowOptions], raw: Mapping[int, bytes]
) -> dict[int, RowDetails]:
    told = {row: RowDetails(value, b"", b"") for row, value in raw.items()}
    rows = [row for row, one in options.items() if one.top_logprobs]
    if not rows:
        return told
    widest = max(options[row].top_logprobs for row in rows)
    top_ids, logprobs = (column.numpy() for column in weighed.likeliest(widest, rows))
    for row, ids, values in zip(rows, top_ids.astype(np.int32), logprobs, strict=True):
        count = options[row].top_logprobs
        raw_of_row = raw.get(row, b"")
        told[row] = RowDetails(raw_of_row, ids[:count].tobytes(), values[:count].tobytes())
    return told
