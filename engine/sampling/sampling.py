"""Samples one token per row from a step's logits, with its log-prob and requested attachments.

Every draw uses the row's own counter-based random number, independent of the rest of the batch.
Edits of logits, limits, draws and reports are compiled (``kernels/native.py``); without a compiler,
``kernels/penalties.py`` and ``kernels/sampling.py`` compute them with torch. Rows with processors
that do more than exclude tokens are edited by torch.

Letters in shapes: S sampling rows, V vocabulary.
"""

import ctypes
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch

from tidegate.engine.sampling import seen_tokens
from tidegate.engine.sampling.options import RowOptions
from tidegate.engine.sampling.scoring import RowScore
from tidegate.kernels.native import DrawReports, Native
from tidegate.kernels.penalties import ban_, bias_, penalize_
from tidegate.kernels.sampling import (
    TokenDistribution,
    weigh,
    weights_of,
)
from tidegate.kernels.uniforms import uniforms
from tidegate.transport.attachments import ATTACHMENTS, AttachmentName

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

    @property
    def is_reported(self) -> bool:
        """Whether the draw reports more than the token and its log-prob."""
        if self.options is None:
            return False
        asked = self.options.params
        return bool(asked.top_logprobs or asked.raw_logprobs or asked.kept_tokens)

    @property
    def is_drawn_whole(self) -> bool:
        """Whether the compiled draw is all that the row needs after the head."""
        own = self.options
        return own is None or not (own.is_processed or own.params.hidden_states)


Drawn = tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]
"""Token ids and log-probs, one per row."""

TokenAttachments = Mapping[AttachmentName, bytes]
"""Requested attachments of one sampled token: its entries as in ``transport/attachments.py``."""

FLOATS = {name for name, kind in ATTACHMENTS.items() if kind.dtypes == ("float32",)}


def all_finite(attachments: Iterable[TokenAttachments]) -> bool:
    """Return whether no value is NaN; excluded tokens have -inf."""
    columns = [entry for each in attachments for name, entry in each.items() if name in FLOATS]
    return not np.isnan(np.frombuffer(b"".join(columns), np.float32)).any()


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Results of one step: a token per sampling row, in the order of the rows, and scores."""

    token_ids: npt.NDArray[np.int32]
    """Sampled token of each sampling row, [S]."""
    logprobs: npt.NDArray[np.float32]
    """[S], natural log, of the distribution sampled from; of the unscaled one at temperature 0."""
    attachments: Mapping[int, TokenAttachments] = field(default_factory=dict)
    """Requested attachments of a token, by sampling row; rows that request none are absent."""
    failures: Mapping[int, str] = field(default_factory=dict)
    """Reason for each sampling row without a sample; its columns' values are meaningless."""
    scores: Sequence[RowScore] = ()
    """Scores of the scored rows, in their order."""
    positions: Mapping[AttachmentName, Mapping[int, npt.NDArray[np.uint8 | np.uint16]]] = field(
        default_factory=dict
    )
    """Attachments by position: by sampling row the entries [P, *shape] of the P positions that the
    row asks for; empty if no row asks."""


def sample_rows(
    logits: torch.Tensor, sampling: Sequence[RowSampling], native: Native | None = None
) -> StepOutput:
    """Sample one token per row of ``logits`` [S, V], float32, which may be overwritten.

    With ``native``, rows are drawn by compiled code, row by row: a row's result has the same bits
    in every batch.
    """
    options = options_of(sampling)
    if native is None:
        return _sample(logits, sampling, options)
    if not options:
        return StepOutput(*_draw(logits, sampling, native))
    logits = logits.contiguous()  # edits use flat indices
    processed = {row: own for row, own in options.items() if own.is_processed}
    raw = {  # copies of logits that are edited below
        row: logits[row].clone() for row, own in processed.items() if own.params.raw_logprobs
    }
    failures = _edit(logits, sampling, processed)

    def draw(reports: DrawReports) -> Drawn:
        reports.wants_raw[list(raw)] = False
        token_ids, logprobs = _draw(logits, sampling, native, reports)
        for row, own_logits in raw.items():
            token = torch.tensor([[int(token_ids[row])]])
            reports.raw_logprobs[row] = weights_of(own_logits[None]).logprobs(token).item()
        return token_ids, logprobs

    output = ReportedDraw(options, *logits.shape).draw([each.index for each in sampling], draw)
    return replace(output, failures={**failures, **output.failures}) if failures else output


def options_of(sampling: Sequence[RowSampling]) -> dict[int, RowOptions]:
    """Return the uncommon options by row, of the rows that have any."""
    return {
        row: params.options for row, params in enumerate(sampling) if params.options is not None
    }


class ReportedDraw:
    """Compiled draws of rows of which some have options, with what these options ask for."""

    def __init__(self, options: Mapping[int, RowOptions], rows: int, vocab: int) -> None:
        """``options``: those of the rows that have any, by row."""
        self._options, self._vocab = options, vocab
        self._edited = {row: own for row, own in options.items() if own.row_edits() is not None}
        """Options whose edits compiled code makes."""
        self._reports = reports = DrawReports(
            rows,
            vocab,
            max(own.params.top_logprobs for own in options.values()),
            sum(own.params.kept_tokens for own in options.values()),
        )
        for row, own in options.items():
            reports.min_p[row] = own.params.min_p
            reports.top_counts[row] = own.params.top_logprobs
            reports.wants_raw[row] = own.params.raw_logprobs
            reports.wants_kept[row] = own.params.kept_tokens
            if (edits := own.row_edits()) is not None:
                reports.edits[row] = ctypes.addressof(edits)

    def draw(self, indices: Sequence[int], by: Callable[[DrawReports], Drawn]) -> StepOutput:
        """Return the output of a draw ``by`` compiled code.

        ``indices``: output index of each row's next token.
        """
        failures: dict[int, str] = {}
        for row, own in self._edited.items():
            index = indices[row]
            self._reports.bans[row] = index < own.min_tokens
            if (reason := own.update_edits(index)) is not None:
                failures[row] = reason
                self._reports.edits[row] = 0  # something must be drawn
        token_ids, logprobs = by(self._reports)
        if self._edited and not math.isfinite(logprobs.sum()):  # which is rare
            failures |= {
                row: own.nothing_left(indices[row])
                for row, own in self._edited.items()
                if np.isneginf(logprobs[row])
            }
        return StepOutput(token_ids, logprobs, self._reported(), failures)

    def _reported(self) -> dict[int, TokenAttachments]:
        found: dict[int, TokenAttachments] = {}
        reports = self._reports
        raw, kept_counts = reports.raw_logprobs.tobytes(), reports.kept_counts.tolist()
        top_ids, top_logprobs = reports.top_ids.tobytes(), reports.top_logprobs.tobytes()
        row_bytes = 4 * reports.top_ids.shape[1]
        kept_from = 0
        for row, own in self._options.items():
            entries: dict[AttachmentName, bytes] = {}
            if own.params.raw_logprobs:
                entries["raw_logprobs"] = raw[4 * row : 4 * row + 4]
            if own.params.top_logprobs:
                top = slice(row * row_bytes, row * row_bytes + 4 * own.params.top_logprobs)
                entries["top_ids"], entries["top_logprobs"] = top_ids[top], top_logprobs[top]
            if own.params.kept_tokens:
                kept = reports.kept_ids[kept_from : kept_from + kept_counts[row]]
                is_whole = kept_counts[row] == self._vocab
                entries["kept_ids"] = b"" if is_whole else kept.tobytes()
                kept_from += kept_counts[row]
            if entries:
                found[row] = entries
        return found


def _draw(
    logits: torch.Tensor,
    sampling: Sequence[RowSampling],
    native: Native,
    reports: DrawReports | None = None,
) -> Drawn:
    return native.draw(logits.contiguous(), *limits(sampling), *random_numbers(sampling), reports)


def limits(
    sampling: Sequence[RowSampling],
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """Return each row's temperature, top-k and top-p."""
    return (
        np.array([params.temperature for params in sampling], np.float32),
        np.array([params.top_k for params in sampling], np.int64),
        np.array([params.top_p for params in sampling], np.float32),
    )


def random_numbers(
    sampling: Sequence[RowSampling],
) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    """Return each row's RNG seed and its draw index."""
    seeds = np.array([params.seed & SEED_MASK for params in sampling], np.uint64)
    return seeds, np.array([params.index for params in sampling], np.uint64)


def _sample(
    logits: torch.Tensor, sampling: Sequence[RowSampling], options: Mapping[int, RowOptions]
) -> StepOutput:
    """Sample with torch."""
    temperature, top_k, top_p = limits(sampling)
    logits = logits.contiguous()  # edits use flat indices
    raw_rows = [row for row, row_options in options.items() if row_options.params.raw_logprobs]
    raw = logits[raw_rows]  # a copy, because the logits are edited below
    failures = _edit(logits, sampling, options)
    min_p = np.zeros(len(logits), np.float32)
    for row, row_options in options.items():
        min_p[row] = row_options.params.min_p
    distribution = weigh(logits, temperature, top_k, top_p, min_p if min_p.any() else None)
    chosen = distribution.draw(temperature, uniforms(*random_numbers(sampling)))
    raw_logprobs: dict[int, bytes] = {}
    if raw_rows:
        values = weights_of(raw).logprobs(chosen[raw_rows][:, None]).numpy()
        raw_logprobs = {row: value.tobytes() for row, value in zip(raw_rows, values, strict=True)}
    return StepOutput(
        chosen.numpy().astype(np.int32),
        distribution.logprobs(chosen[:, None]).squeeze(-1).numpy(),
        _attachments(distribution, options, raw_logprobs),
        failures,
    )


def _edit(
    logits: torch.Tensor, sampling: Sequence[RowSampling], options: Mapping[int, RowOptions]
) -> dict[int, str]:
    """Apply bias, bans, penalties and processors in place; return the rows that
    failed, with reasons."""
    vocab_size = logits.shape[-1]
    biased = {row: row_options for row, row_options in options.items() if len(row_options.bias_ids)}
    if biased:
        indices = np.concatenate(
            [row * vocab_size + row_options.bias_ids for row, row_options in biased.items()]
        )
        biases = np.concatenate([row_options.biases for row_options in biased.values()])
        bias_(logits, torch.from_numpy(indices), torch.from_numpy(biases))
    below_min_tokens = [
        row for row, row_options in options.items() if sampling[row].index < row_options.min_tokens
    ]
    if below_min_tokens:
        indices = np.concatenate(
            [row * vocab_size + options[row].banned for row in below_min_tokens]
        )
        ban_(logits, torch.from_numpy(indices))
    seen = {
        row: row_options.seen
        for row, row_options in options.items()
        if row_options.seen is not None
    }
    if seen:
        penalize_(logits, seen_tokens.batched(list(seen), list(seen.values()), vocab_size))
    failures: dict[int, str] = {}
    for row, row_options in options.items():
        if (
            row_options.logits_processors
            and (reason := row_options.process(logits[row], sampling[row].index)) is not None
        ):
            failures[row] = reason
            logits[row] = 0.0  # the unused sample must not be drawn from NaN
    return failures


def _attachments(
    distribution: TokenDistribution,
    options: Mapping[int, RowOptions],
    raw_logprobs: Mapping[int, bytes],
) -> dict[int, TokenAttachments]:
    found: dict[int, dict[AttachmentName, bytes]] = {row: {} for row in options}
    found |= {row: {"raw_logprobs": value} for row, value in raw_logprobs.items()}
    for row, (ids, logprobs) in _top_tokens(distribution, options).items():
        found[row] |= {"top_ids": ids, "top_logprobs": logprobs}
    kept_rows = [row for row, row_options in options.items() if row_options.params.kept_tokens]
    for row, kept in zip(kept_rows, distribution.kept(kept_rows) if kept_rows else (), strict=True):
        found[row]["kept_ids"] = kept
    return {row: entries for row, entries in found.items() if entries}


def hidden_rows(sampling: Sequence[RowSampling]) -> list[int]:
    """Return the indices of the rows whose hidden states are requested."""
    return [
        row
        for row, params in enumerate(sampling)
        if params.options is not None and params.options.params.hidden_states
    ]


def with_hidden_states(output: StepOutput, rows: Sequence[int], hidden: torch.Tensor) -> StepOutput:
    """Attach the normed last hidden states ``hidden`` [len(rows), H] of these sampling rows."""
    attachments = dict(output.attachments)
    for row, state in zip(rows, hidden.float().numpy(), strict=True):
        attachments[row] = {**attachments.get(row, {}), "hidden_states": state.tobytes()}
    return replace(output, attachments=attachments)


def _top_tokens(
    distribution: TokenDistribution, options: Mapping[int, RowOptions]
) -> dict[int, tuple[bytes, bytes]]:
    """Return the ids and log-probs of the requested number of top tokens, by row."""
    rows = [row for row, row_options in options.items() if row_options.params.top_logprobs]
    if not rows:
        return {}
    count_max = max(options[row].params.top_logprobs for row in rows)
    ids, logprobs = distribution.likeliest(count_max, rows)
    id_bytes, logprob_bytes = ids.int().numpy().tobytes(), logprobs.numpy().tobytes()
    starts = range(0, len(id_bytes), 4 * count_max)
    places = [
        slice(start, start + 4 * options[row].params.top_logprobs)
        for row, start in zip(rows, starts, strict=True)
    ]
    pairs = [(id_bytes[place], logprob_bytes[place]) for place in places]
    return dict(zip(rows, pairs, strict=True))
