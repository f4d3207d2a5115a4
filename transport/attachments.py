"""Token attachments: typed per-token data that rides beside a turn's token ids and log-probs.

A ``Step`` carries a list of :class:`Attachment`, for turns whose ``SamplingParams`` request any.
Engines make them, the orchestrator's core stores them with the turn. Built on ``msgspec`` and
``limits.py`` only; :mod:`tidegate.orchestrator.core.step_checks` checks the values.
"""

from dataclasses import dataclass
from math import prod
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
    """Type of an attachment's entries."""

    axis: Literal["token", "position"]
    """``token``: an entry for each output token. ``position``: for each context position, prompt
    included, whose KV the engine has computed or taken from its cache."""
    dtypes: tuple[str, ...]
    dimensions: int = 0
    """Length of ``Attachment.shape``."""
    is_ragged: bool = False
    """Whether entries have different numbers of values."""
    is_added: bool = False
    """Whether the orchestrator adds it to ended turns, from scores. Engines must not report it."""
    is_logprob: bool = False
    """Whether its values are natural logarithms of probabilities."""


ATTACHMENTS: dict[AttachmentName, AttachmentKind] = {
    "raw_logprobs": AttachmentKind("token", ("float32",), is_logprob=True),
    "top_ids": AttachmentKind("token", ("int32",), 1),
    "top_logprobs": AttachmentKind("token", ("float32",), 1, is_logprob=True),
    "kept_ids": AttachmentKind("token", ("int32",), is_ragged=True),
    "routed_experts": AttachmentKind("position", ("uint8", "uint16"), 2),
    "hidden_states": AttachmentKind("token", ("float32",), 1),
    "teacher_logprobs": AttachmentKind("token", ("float32",), is_added=True, is_logprob=True),
    "teacher_top_ids": AttachmentKind("token", ("int32",), 1, is_added=True),
    "teacher_top_logprobs": AttachmentKind(
        "token", ("float32",), 1, is_added=True, is_logprob=True
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
