"""Rollouts and turns: slotted objects whose context grows as tokens are appended.

The core owns them; episodes, batches and recorders read them. A rollout's context (prompts, sampled
tokens and observations, in the order the model saw them) is one growing array, so the row that a
trainer gets is exactly what the engine read and wrote.
"""

import struct
from array import array
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from functools import lru_cache
from math import nan
from types import MappingProxyType
from typing import Protocol

from msgspec import Struct, field

from tidegate.orchestrator.core.provenance import TurnPrefill, VersionRun, VersionSpan, spans_of
from tidegate.orchestrator.core.token_attachments import TurnAttachments
from tidegate.transport.attachments import Attachment
from tidegate.transport.media import Media
from tidegate.transport.messages import SamplingParams


def token_array(token_ids: Sequence[int]) -> "array[int]":
    """Return ``array("i", token_ids)``, in two thirds of the constructor's time for a list.

    Raises:
        TypeError: an item is not an int.
        OverflowError: an item does not fit int32.
    """
    try:
        return array("i", _int32s(len(token_ids)).pack(*token_ids))
    except struct.error:
        return array("i", token_ids)  # raises the error that names the cause


@lru_cache(maxsize=1024)
def _int32s(count: int) -> struct.Struct:
    return struct.Struct(f"{count}i")


class DeferredTokens(Protocol):
    """Sampled tokens that are counted, but not in their turns' contexts before :meth:`settle`."""

    tokens_per_row: int
    """Collected tokens of each turn that refers to this."""

    def settle(self) -> None:
        """Append the tokens to the contexts now."""


class Turn:
    """One generation call within a rollout: a slice of its context, with provenance."""

    __slots__ = (
        "attachments",
        "consecutive_losses",
        "deferred_tokens",
        "filed",
        "filed_logprobs",
        "filed_token_ids",
        "finish_reason",
        "is_evaluation",
        "losses",
        "media",
        "number",
        "place",
        "prefills",
        "priority",
        "reward",
        "rollout",
        "rollout_id",
        "runs",
        "sampled_before",
        "sampled_by",
        "sampling",
        "start",
    )

    def __init__(
        self, rollout: "Rollout", sampling: SamplingParams, media: tuple[Media, ...] = ()
    ) -> None:
        self.rollout = rollout
        """Rollout of the turn. Deleted once the turn has ended, so that both are freed without
        the garbage collector."""
        self.rollout_id = rollout.rollout_id
        self.number = len(rollout.turns)
        """Number of the turn in its rollout, from 0."""
        self.filed_token_ids = rollout.filed_token_ids
        self.filed_logprobs = rollout.filed_logprobs
        self.sampling = sampling
        self.media = media
        """Media added to the context since the previous turn."""
        if media:
            rollout.may_have_media = True
        if self.number:
            rollout.settle()
        self.start = len(self.filed_token_ids)
        """Index in the rollout's context of the first output token."""
        self.filed = 0
        """Number of output tokens that are in the rollout's context."""
        self.deferred_tokens: DeferredTokens | None = None
        """Columns that hold the output tokens after the first ``filed`` ones; None if none do."""
        self.runs: list[VersionRun] = []
        self.prefills: Sequence[TurnPrefill] = ()
        self.finish_reason: str | None = None
        """``stop``, ``length``, ``cancelled`` or ``refused``; None while the turn runs."""
        self.place: tuple[str, int] | None = None
        """(engine, handle) of the submission; None while the turn is on no engine."""
        self.priority = 0
        """Priority in the queue of the engine in ``place``."""
        self.sampled_before = 0
        """Number of output tokens when the turn was sent to the engine in ``place``."""
        self.sampled_by = -1
        """Version of the newest token from the present engine; -1 before the first."""
        self.is_evaluation = rollout.group_id < 0
        self.losses = 0
        """Number of engines that were lost while they had this turn."""
        self.consecutive_losses = 0
        """Number of engines lost in a row, without a token of this turn between two losses."""
        self.reward: float | None = None
        """Reward of this turn alone, beside the rollout's; None if the episode gave none."""
        self.attachments = TurnAttachments(sampling) if sampling.requests_attachments else None
        """Attachments of the output tokens and the context; None if the turn requests none."""

    @property
    def length(self) -> int:
        """Number of output tokens so far."""
        deferred_tokens = self.deferred_tokens
        return (
            self.filed if deferred_tokens is None else self.filed + deferred_tokens.tokens_per_row
        )

    def settle(self) -> None:
        """Append the turn's collected tokens to the context."""
        if self.deferred_tokens is not None:
            self.deferred_tokens.settle()

    def token_ids_from(self, index: int) -> "array[int]":
        """Return a copy of the output tokens from index ``index`` on."""
        self.settle()
        return self.filed_token_ids[self.start + index : self.start + self.filed]

    @property
    def token_ids(self) -> "array[int]":
        """Copy of the output tokens so far."""
        return self.token_ids_from(0)

    def logprobs_from(self, index: int) -> "array[float]":
        """Return a copy of the output tokens' log-probs from index ``index`` on."""
        self.settle()
        return self.filed_logprobs[self.start + index : self.start + self.filed]

    @property
    def logprobs(self) -> "array[float]":
        """Copy of the output tokens' log-probs, under the distribution they were sampled from."""
        return self.logprobs_from(0)

    def attach(self, attachment: Attachment) -> None:
        """Add an attachment of all output tokens, which no engine has reported."""
        if self.attachments is None:
            self.attachments = TurnAttachments(self.sampling)
        self.attachments.add(attachment)

    def append(self, token_id: int, logprob: float, version: int, engine: str) -> None:
        """Append one sampled token."""
        self.begin_run(version, engine)
        rollout = self.rollout
        rollout.token_ids.append(token_id)
        rollout.logprobs.append(logprob)
        self.filed += 1

    def begin_run(self, version: int, engine: str) -> None:
        """Record that the next token is sampled by ``version`` on ``engine``."""
        self.sampled_by = version
        runs = self.runs
        if not runs:
            runs.append(VersionRun(version, 0, engine))
        elif runs[-1].version != version or runs[-1].engine != engine:
            runs.append(VersionRun(version, self.length, engine))

    def remove_tokens(self) -> int:
        """Remove this turn's tokens, the newest of the context; return their number."""
        tokens, rollout = self.length, self.rollout
        del rollout.token_ids[self.start :], rollout.logprobs[self.start :]
        self.filed, self.deferred_tokens = 0, None
        self.runs, self.prefills, self.attachments = [], (), None
        return tokens

    def spans(self) -> list[VersionSpan]:
        """Return the provenance of the output tokens, as maximal spans."""
        return list(spans_of(self.runs, self.prefills, self.length))


class RolloutState(StrEnum):
    """State of a rollout."""

    RUNNING = "running"
    """Running: the rollout's episode has not ended."""
    FINISHED = "finished"
    """The rollout has a reward and waits for its group, or for the trainer."""
    EVALUATED = "evaluated"
    """The rollout has a reward and was an evaluation."""
    TRAINED = "trained"
    """The rollout was handed to the trainer; ``discard_reason`` is set if it was discarded."""
    DISCARDED = "discarded"
    """The rollout will never be trained; ``discard_reason`` is the reason."""


RUNNING = RolloutState.RUNNING
FINISHED = RolloutState.FINISHED
TRAINED = RolloutState.TRAINED
DISCARDED = RolloutState.DISCARDED
"""Names of the states that every rollout gets or is compared with: on Python 3.11 a member of an
enum takes as long to read as three calls."""


NO_AGENTS: Mapping[str, "Rollout"] = MappingProxyType({})


class Rollout(Struct, eq=False):
    """One attempt at a task, or a branch of one: its context, turns and reward."""

    rollout_id: int
    group_id: int
    index: int
    """Position in the group, 0 <= index < group_size."""
    adapter: str = ""
    """Trained adapter that the rollout is for, and that samples it; empty: the run's weights."""
    turns: list[Turn] = []
    filed_token_ids: "array[int]" = field(default_factory=lambda: array("i"))
    """The array of :attr:`token_ids`, without settling deferred tokens first; for hot paths where
    none can be deferred."""
    filed_logprobs: "array[float]" = field(default_factory=lambda: array("f"))
    may_have_media: bool = False
    """Whether any turn had media. Read at every submission, and rarely true."""
    reward: float | None = None
    state: RolloutState = RUNNING
    discard_reason: str | None = None
    began_s: float = nan
    """When its episode began first, as :attr:`ended_s`; retries do not change it."""
    ended_s: float = nan
    """When its episode ended, on the run loop's clock; only for figures, never for decisions, and
    not in the journal."""
    oldest_trainable: int = 0
    """Tokens of older versions are masked. Set when the rollout is handed over."""
    pinned_version: int | None = None
    """Version that must sample every token; None for all but pinned evaluations."""
    use: int = 1
    """Number of the use that the row is for, from 1; each use has a copy of the row."""
    retries: int = 0
    """Number of times that its episode was begun again after a failure of infrastructure."""
    branch_of: "Rollout | None" = None
    """For a branch: the row that it was forked from, whose context it began with."""
    fork_reason: str = ""
    """For a branch: why it was forked."""
    agents: "Mapping[str, Rollout]" = NO_AGENTS
    """Rollouts of other adapters that its episode samples too, by adapter."""
    home: "Rollout | None" = None
    """If this rollout is in another rollout's ``agents``: that other rollout, whose episode samples
    this one."""
    branches: "tuple[Rollout, ...]" = ()
    """Rows forked from this one, in order; they end with it and get its reward."""

    def __repr__(self) -> str:
        return f"<rollout {self.rollout_id}>"  # not its tokens, and rows refer to each other

    @property
    def root(self) -> "Rollout":
        """The row that the attempt began with."""
        row = self
        while row.branch_of is not None:
            row = row.branch_of
        return row

    @property
    def episode_id(self) -> int:
        """Id of the rollout whose episode samples this row."""
        root = self.root
        return root.rollout_id if root.home is None else root.home.rollout_id

    @property
    def rows(self) -> "Iterator[Rollout]":
        """This row and all rows forked from it, each with its own context."""
        yield self
        for branch in self.branches:
            yield from branch.rows

    def remove_from_tree(self) -> None:
        """Remove a branch from the tree; its branches become branches of its parent."""
        forked = self.branch_of
        assert forked is not None, "only a branch can be removed from its tree"
        for branch in self.branches:
            branch.branch_of = forked
        siblings = [branch for branch in forked.branches if branch is not self]
        forked.branches = (*siblings, *self.branches)

    def extend(self, token_ids: "array[int] | list[int]") -> None:
        """Append given tokens (a prompt, an observation) to the context."""
        if not isinstance(token_ids, array):
            token_ids = token_array(token_ids)  # raises for an invalid id before any change
        if self.turns:
            self.settle()
        self.filed_token_ids.extend(token_ids)
        self.filed_logprobs.frombytes(bytes(4 * len(token_ids)))  # 0.0 each

    def settle(self) -> None:
        """Append the collected tokens of its last turn to the context."""
        turns = self.turns
        if turns and (deferred_tokens := turns[-1].deferred_tokens) is not None:
            deferred_tokens.settle()

    @property
    def token_ids(self) -> "array[int]":
        """Context: everything the model read and wrote, in order; always the same array."""
        if self.turns:
            self.settle()
        return self.filed_token_ids

    @property
    def logprobs(self) -> "array[float]":
        """One log-prob per token of the context; 0.0 where the token was given, not sampled."""
        self.settle()
        return self.filed_logprobs

    @property
    def media(self) -> list[Media]:
        """Media of all turns, in order."""
        return [each for turn in self.turns for each in turn.media]

    @property
    def sampled_end(self) -> int:
        """Index in the context after the last turn's tokens; what follows was given since."""
        return self.turns[-1].start + self.turns[-1].length if self.turns else 0

    def cut(self, *, turns: int) -> None:
        """Keep only the first ``turns`` turns, and the context up to the last kept turn's end.

        Tokens that an episode appended after that turn are removed too: no event has reported them
        yet, so a core that replays the journal does not have them.
        """
        self.settle()
        del self.turns[turns:]
        end = self.sampled_end
        del self.filed_token_ids[end:], self.filed_logprobs[end:]

    @property
    def sampled_tokens(self) -> int:
        """Number of tokens that the model sampled, over all turns."""
        tokens = 0
        for turn in self.turns:  # read twice for every rollout, so `length` is written out
            tokens += turn.filed
            if turn.deferred_tokens is not None:
                tokens += turn.deferred_tokens.tokens_per_row
        return tokens

    @property
    def tokens_of_all_rows(self) -> int:
        """Number of tokens sampled in this row and all rows forked from it."""
        tokens = self.sampled_tokens
        return tokens + sum(branch.tokens_of_all_rows for branch in self.branches)

    @property
    def masked_tokens(self) -> int:
        """Number of sampled tokens too old to be trained on."""
        if not self.oldest_trainable:
            return 0
        return sum(
            span.end - span.start
            for turn in self.turns
            for span in turn.spans()
            if span.version < self.oldest_trainable
        )

    def trained_versions(self) -> tuple[int, bool] | None:
        """Return the oldest version of unmasked tokens, and whether any token has another; None if
        all are masked."""
        oldest = newest = -1
        oldest_trainable = self.oldest_trainable
        for turn in self.turns:
            for run in turn.runs:
                version = run.version
                if version >= oldest_trainable and (oldest < 0 or version < oldest):
                    oldest = version
                if version > newest:
                    newest = version
        return None if oldest < 0 else (oldest, oldest != newest)

    @property
    def oldest_trained_version(self) -> int | None:
        """Oldest version of its unmasked tokens; None if there are none."""
        versions = self.trained_versions()
        return None if versions is None else versions[0]

    @property
    def oldest_version(self) -> int | None:
        """Oldest version that sampled one of its tokens; None before the first token."""
        oldest = None
        for turn in self.turns:
            for run in turn.runs:
                if oldest is None or run.version < oldest:
                    oldest = run.version
        return oldest

    @property
    def newest_version(self) -> int | None:
        """Newest version that sampled one of its tokens; None before the first token."""
        newest = None
        for turn in self.turns:
            for run in turn.runs:
                if newest is None or run.version > newest:
                    newest = run.version
        return newest
