"""Token attachments: typed per-token data beside a turn's token ids and log-probs.

A ``Step`` carries a list of :class:`Attachment`, for turns whose ``SamplingParams`` request any.
Engines make them, the orchestrator's core stores them with the turn, and a trainer's batch has them
as columns. Core, journal, batches and the remote trainer's wire carry any attachment that
:data:`ATTACHMENTS` declares; :mod:`tidegate.orchestrator.core.step_checks` checks the values.
"""

from dataclasses import dataclass
from math import inf, nan, prod
from typing import Literal

import msgspec

from tidegate.transport.limits import Count

AttachmentName = Literal[
    "raw_logprobs",
    "top_ids",
    "top_logprobs",
    "kept_ids",
    "routed_experts",
    "hidden_states",
    "teacher_logprobs",
    "teacher_top_ids",
    "teacher_top_logprobs",
]

ITEM_BYTES = {"float32": 4, "int32": 4, "uint8": 1, "uint16": 2}
"""Bytes of one value, by dtype; values are little-endian."""

HIDDEN_STATES_BYTES_MAX = 64 * 1024 * 1024
"""Limit of one turn's hidden states: 16,384 tokens of 1,024 values. Engines refuse turns whose
``max_tokens`` exceed it."""

ENTRY_DIMENSIONS_MAX = 3
"""Maximum length of ``Attachment.shape``."""


class Attachment(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Consecutive entries of one attachment of one turn.

    An entry belongs to one output token, or to one context position (:attr:`AttachmentKind.axis`).
    It comes with the step message of its token, or with an earlier one that has no token of the
    turn. An entry for an index that already has one replaces it.
    """

    turn: Count
    name: AttachmentName
    start: Count
    """Index of the first entry: among the output tokens of this submission, or context position."""
    dtype: Literal["float32", "int32", "uint8", "uint16"]
    values: bytes
    shape: list[Count] = []
    """Shape of an entry, e.g. [L, k]; empty for scalars and for ragged entries."""
    counts: bytes = b""
    """uint32: values of each entry, for ragged attachments; else empty."""

    @property
    def entry_bytes(self) -> int:
        """Bytes of an entry that is not ragged."""
        return ITEM_BYTES[self.dtype] * prod(self.shape)

    @property
    def length(self) -> int:
        """Number of entries."""
        if ATTACHMENTS[self.name].is_ragged:
            return len(self.counts) // 4
        return len(self.values) // max(self.entry_bytes, 1)


@dataclass(frozen=True, slots=True)
class AttachmentKind:
    """Who makes an attachment, the type of its entries, and how a batch shows them."""

    option: str
    """Field of ``SamplingParams`` that requests it from engines. Empty: the orchestrator adds it to
    ended turns, from scores, and engines must not report it."""
    axis: Literal["token", "position"]
    """``token``: an entry for each output token. ``position``: for each context position, prompt
    included, whose KV the engine has computed or taken from its cache."""
    dtypes: tuple[str, ...]
    dimensions: int = 0
    """Length of ``Attachment.shape``."""
    is_ragged: bool = False
    """Whether entries have different numbers of values."""
    is_sized_by_option: bool = False
    """Whether ``option`` is the length of an entry."""
    is_logprob: bool = False
    """Whether its values are natural logarithms of probabilities."""
    unknown: float = 0
    """Value in a batch of a sampled token whose entry is not known."""
    padding: float = 0
    """Value in a batch of a token that was not sampled, and after the end of a shorter entry."""
    companion: str = ""
    """Second column of a batch: of a ragged attachment, each token's number of values; of one by
    position, which positions are known. Empty if there is none."""

    @property
    def is_added(self) -> bool:
        """Whether the orchestrator adds it; see ``option``."""
        return not self.option


ATTACHMENTS: dict[AttachmentName, AttachmentKind] = {
    "raw_logprobs": AttachmentKind(
        "raw_logprobs", "token", ("float32",), is_logprob=True, unknown=nan
    ),
    "top_ids": AttachmentKind("top_logprobs", "token", ("int32",), 1, is_sized_by_option=True),
    "top_logprobs": AttachmentKind(
        "top_logprobs",
        "token",
        ("float32",),
        1,
        is_sized_by_option=True,
        is_logprob=True,
        unknown=-inf,
        padding=-inf,
    ),
    "kept_ids": AttachmentKind(
        "kept_tokens", "token", ("int32",), is_ragged=True, companion="kept_counts"
    ),
    "routed_experts": AttachmentKind(
        "routed_experts", "position", ("uint8", "uint16"), 2, companion="routed_experts_mask"
    ),
    "hidden_states": AttachmentKind("hidden_states", "token", ("float32",), 1),
    "teacher_logprobs": AttachmentKind("", "token", ("float32",), is_logprob=True, unknown=nan),
    "teacher_top_ids": AttachmentKind("", "token", ("int32",), 1),
    "teacher_top_logprobs": AttachmentKind(
        "", "token", ("float32",), 1, is_logprob=True, unknown=-inf, padding=-inf
    ),
}
"""Kind of each attachment.

* ``raw_logprobs``: log-prob of the token before all sampling options.
* ``top_ids`` [k], ``top_logprobs`` [k]: most likely tokens, in descending order, with their
  log-probs after all options; -inf for excluded tokens.
* ``kept_ids``: tokens that the sampling options left to sample from, in ascending order. An empty
  entry means that all tokens were left.
* ``routed_experts`` [L, k]: experts that each of L mixture layers chose for the position.
* ``hidden_states`` [H]: normed last hidden state from which the token was sampled.
* ``teacher_logprobs``, ``teacher_top_ids`` [k], ``teacher_top_logprobs`` [k]: another model's
  log-prob of the token, and its most likely tokens.
"""
