"""Token attachments: typed per-token data beside a turn's token ids and log-probs.

A ``Step`` carries a list of :class:`Attachment`, for turns whose ``SamplingParams`` request any.
Engines make them, the orchestrator's core stores them with the turn, and a trainer's batch has them
as columns. :class:`AttachmentColumns` declares each one; the code between its maker and its reader
carries any. :mod:`tidegate.orchestrator.core.step_checks` checks the values.
"""

from dataclasses import dataclass
from math import inf, nan, prod
from typing import Any, Generic, Literal, Self, TypeVar, get_args

import msgspec
import numpy.typing as npt

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

Dtype = Literal["float32", "int32", "uint8", "uint16"]

ITEM_BYTES: dict[Dtype, int] = {"float32": 4, "int32": 4, "uint8": 1, "uint16": 2}
"""Bytes of one value, by dtype; values are little-endian."""

HIDDEN_STATES_BYTES_MAX = 64 * 1024 * 1024
"""Limit of one turn's hidden states: 16,384 tokens of 1,024 values. Engines refuse turns whose
``max_tokens`` exceed it."""


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
    dtype: Dtype
    values: bytes
    shape: list[Count] = []
    """Shape of an entry, e.g. [L, k]; empty for scalars and for ragged entries."""
    counts: bytes = b""
    """uint32: values of each entry, for ragged attachments; else empty."""

    @classmethod
    def of(cls, turn: int, name: AttachmentName, start: int, entries: npt.NDArray[Any]) -> Self:
        """Return entries [C, *shape] that are not ragged, converted unless their dtype may be."""
        dtypes = ATTACHMENTS[name].dtypes
        dtype = dtypes[-1] if entries.dtype == dtypes[-1] else dtypes[0]
        values = entries.astype(dtype, copy=False).tobytes()
        return cls(turn, name, start, dtype, values, list(entries.shape[1:]))

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


T = TypeVar("T")


class _Column:
    """Attribute of :class:`AttachmentColumns` that reads the column of its name."""

    __slots__ = ("column",)
    column: str

    def __set_name__(self, owner: type, name: str) -> None:
        self.column = name

    def __get__(self, columns: "AttachmentColumns[T]", owner: object) -> T | None:
        return columns.attachment(self.column)


@dataclass(slots=True)
class AttachmentKind(_Column):
    """Who makes an attachment, the type of its entries, and how a batch shows them."""

    option: str
    """Field of ``SamplingParams`` that requests it from engines. Empty: the orchestrator adds it to
    ended turns, from scores, and engines must not report it."""
    axis: Literal["token", "position"]
    """``token``: an entry for each output token. ``position``: for each context position, prompt
    included, whose KV the engine has computed or taken from its cache."""
    dtypes: tuple[Dtype, ...]
    dimensions: int = 0
    """Length of ``Attachment.shape``."""
    is_ragged: bool = False
    """Whether entries have different numbers of values."""
    is_sized_by_option: bool = False
    """Whether ``option`` is the length of an entry."""
    is_logprob: bool = False
    """Whether its values are natural logarithms of probabilities."""
    companion: str = ""
    """Second column of a batch: of a ragged attachment, each token's number of values; of one by
    position, which positions are known. Empty if there is none."""
    json_field: str = ""
    """Field of JSON answers, as vLLM names it: of an attachment by position, base64 of a .npy file;
    by token, a list. Empty if answers do not have it, or in another form."""

    @property
    def is_added(self) -> bool:
        """Whether the orchestrator adds it; see ``option``."""
        return not self.option

    @property
    def padding(self) -> float:
        """Value in a batch of a token that was not sampled, and after the end of a shorter entry:
        a top token that is not there has no probability."""
        return -inf if self.is_logprob and self.dimensions else 0

    @property
    def unknown(self) -> float:
        """Value in a batch of a sampled token whose entry is not known."""
        return nan if self.is_logprob and not self.dimensions else self.padding


class AttachmentColumns(Generic[T]):
    """Declares each attachment under the name of its column in a batch. The attribute of a batch is
    that column; None if no turn requested the attachment, as by ``generate(top_logprobs=8)``.

    Shapes: R rows, T tokens of the longest row, M kept tokens of all tokens, L mixture layers, k
    experts per token, K top tokens, H hidden size; R is absent and T is all tokens in a packed
    batch. An entry on the wire has the dimensions after [R, T].
    """

    __slots__ = ()

    def attachment(self, column: str) -> T | None:
        """Return one of :data:`BATCH_COLUMNS`; None if the batch does not have it."""
        raise NotImplementedError

    raw_logprobs = AttachmentKind("raw_logprobs", "token", ("float32",), is_logprob=True)
    """[R, T] float32: log-prob of each sampled token before all sampling options, at temperature
    1; 0 on other tokens, NaN where an engine did not report it."""
    top_ids = AttachmentKind("top_logprobs", "token", ("int32",), 1, is_sized_by_option=True)
    """[R, T, K] int32: the K most likely tokens where each token was sampled, in descending
    order."""
    top_logprobs = AttachmentKind(
        "top_logprobs", "token", ("float32",), 1, is_sized_by_option=True, is_logprob=True
    )
    """[R, T, K] float32: behaviour log-probs of ``top_ids``, after all sampling options; -inf for
    excluded tokens, and where the top tokens are not known."""
    kept_ids = AttachmentKind(
        "kept_tokens",
        "token",
        ("int32",),
        is_ragged=True,
        companion="kept_counts",
        json_field="sampling_mask",
    )
    """[M] int32: the tokens that min-p, top-k and top-p left to sample from, token after token and
    row after row, each token's in ascending order; see ``tidegate.kept_logprobs``. An empty entry
    means that all tokens were left."""
    kept_counts = _Column()
    """[R, T] int32: number of entries in ``kept_ids`` for each token; 0 for a token that was
    sampled from the whole vocabulary, or given."""
    routed_experts = AttachmentKind(
        "routed_experts",
        "position",
        ("uint8", "uint16"),
        2,
        companion="routed_experts_mask",
        json_field="routed_experts",
    )
    """[R, T, L, k], uint8, or int16 for more than 256 experts: the experts that each of L mixture
    layers chose for the position, when its KV was computed last."""
    routed_experts_mask = _Column()
    """[R, T] bool: positions whose routed experts are known. The experts of a row's last token are
    not known, because no later token has needed its KV."""
    hidden_states = AttachmentKind("hidden_states", "token", ("float32",), 1)
    """[R, T, H] float32: normed last hidden state from which each token was sampled; 0 on other
    tokens, and where it is not known."""
    teacher_logprobs = AttachmentKind("", "token", ("float32",), is_logprob=True)
    """[R, T] float32: log-prob of each sampled token under the model that
    ``episode.attach_teacher`` asked; 0 on other tokens, NaN on sampled ones that were not
    scored."""
    teacher_top_ids = AttachmentKind("", "token", ("int32",), 1)
    """[R, T, K] int32: the K tokens that the teacher finds most likely in each sampled token's
    place, in descending order."""
    teacher_top_logprobs = AttachmentKind("", "token", ("float32",), 1, is_logprob=True)
    """[R, T, K] float32: the teacher's log-probs of ``teacher_top_ids``; -inf where they are not
    known."""


ATTACHMENTS: dict[AttachmentName, AttachmentKind] = {
    name: vars(AttachmentColumns)[name] for name in get_args(AttachmentName)
}
"""Kind of each attachment."""

SWITCHES = {kind.option for kind in ATTACHMENTS.values() if kind.option} - {
    kind.option for kind in ATTACHMENTS.values() if kind.is_sized_by_option
}
"""Options that request an attachment by True, not by a number."""

BATCH_COLUMNS: dict[str, float] = {
    name: each.padding if isinstance(each, AttachmentKind) else 0
    for name, each in vars(AttachmentColumns).items()
    if isinstance(each, _Column)
}
"""Columns of a batch for attachments, with the value of each on padding."""

RAGGED_COLUMNS: dict[str, str] = {
    name: kind.companion for name, kind in ATTACHMENTS.items() if kind.is_ragged
}
"""Columns of a batch with any number of values per token, and the columns of these numbers. All
others have an entry per token."""
