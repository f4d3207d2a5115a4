"""New output of a choice since the last read: tokens, log-probs, text, and how the choice ended."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from tidegate.orchestrator.core.token_attachments import NO_ATTACHMENTS
from tidegate.orchestrator.episodes.incremental_detokenizer import (
    IncrementalDetokenizer,
    TokenTexts,
    token_name,
)
from tidegate.orchestrator.episodes.model_files import LONG_CHARACTERS, TextEncoder
from tidegate.serving.http.server import off_loop
from tidegate.serving.openai.active_requests import ActiveChoice
from tidegate.serving.openai.answers import SentText
from tidegate.serving.openai.model_info import VersionLabels
from tidegate.transport.token_bytes import TokenBytes

if TYPE_CHECKING:
    from tidegate.orchestrator.episodes.generated_turn import GeneratedTurn

TopLogprobs = Mapping[int, float]
"""Log-probs of the likeliest tokens by id, likeliest first; the sampled token may be missing."""


# ---------------------------------------------------------------- text


@dataclass(frozen=True, slots=True)
class StopConditions:
    """Tokens and strings that end an output, and how its text is cut there."""

    stop_token_ids: frozenset[int] = frozenset()
    """All stop tokens: those of the model and those of the request."""
    model_stops: frozenset[int] = frozenset()
    """Stop tokens that the model names and the request does not."""
    stop_strings: tuple[str, ...] = ()
    includes_stop: bool = False
    """Whether the stop string or token itself is part of the text."""
    skips_special_tokens: bool = True
    """Whether special tokens are omitted from the text."""

    def ends_in_stop_token(self, token_ids: Sequence[int]) -> bool:
        """Whether the last token is a stop token."""
        return bool(token_ids) and token_ids[-1] in self.stop_token_ids

    def first_stop_string(self, text: str) -> tuple[int, str] | None:
        """Return where the first stop string of a text begins, and the string."""
        found = [(start, each) for each in self.stop_strings if (start := text.find(each)) >= 0]
        return min(found, key=lambda stop: stop[0], default=None)


class OutputTokenizer:
    """Tokenizer of the served model: encodes texts, decodes tokens and whole outputs."""

    def __init__(self, encoder: TextEncoder) -> None:
        self.tokenizer = encoder.tokenizer
        self._encoder = encoder
        self._token_bytes = TokenBytes(self.tokenizer)

    def token(self, token_id: int) -> str:
        """Return the text of a single token, or its bytes if it ends within a character."""
        return token_name(self._token_bytes[token_id])

    def token_texts(self) -> TokenTexts:
        """Return the texts of an output's tokens, which are to be added in order."""
        return TokenTexts(self.tokenizer, self._token_bytes)

    def decode(self, token_ids: Sequence[int], *, skips_special_tokens: bool) -> str:
        """Return the text of a sequence of tokens."""
        ids = list(token_ids)
        text: str = self.tokenizer.decode(ids, skip_special_tokens=skips_special_tokens)
        return text

    async def encode(
        self, text: str, *, adds_special_tokens: bool, tokens_max: int | None = None
    ) -> list[int]:
        """Return the tokens of a text; a long one is tokenised in a thread.

        Raises:
            ChatRefused: the tokenizer can't encode the text.
            ContextFull: the text surely has ``tokens_max`` tokens or more.
        """

        def encode() -> list[int]:
            return self._encoder.encode(
                text, adds_special_tokens=adds_special_tokens, tokens_max=tokens_max
            )

        return encode() if len(text) < LONG_CHARACTERS else await off_loop(encode)

    def whole(self, token_ids: Sequence[int], stops: StopConditions, *, has_stopped: bool) -> str:
        """Return the text of an output that has ended, cut where it stopped."""
        if has_stopped and not stops.includes_stop and stops.ends_in_stop_token(token_ids):
            token_ids = token_ids[:-1]
        text = self.decode(token_ids, skips_special_tokens=stops.skips_special_tokens)
        found = stops.first_stop_string(text) if has_stopped else None
        if found is None:
            return text
        start, string = found
        return text[: start + len(string) if stops.includes_stop else start]

    def stop_reason(self, token_ids: Sequence[int], stops: StopConditions) -> int | str | None:
        """Return the stop string or token id that ended an output; None for a stop of the model."""
        if stops.ends_in_stop_token(token_ids):
            last = token_ids[-1]
            return None if last in stops.model_stops else last
        text = self.decode(token_ids, skips_special_tokens=False)
        found = stops.first_stop_string(text)
        return None if found is None else found[1]


# ---------------------------------------------------------------- parts of an output


@dataclass(frozen=True, slots=True)
class Output:
    """A part of a choice's output, or all of it."""

    index: int
    """Index of the choice within the answer."""
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    tops: Sequence[TopLogprobs]
    """Likeliest tokens at each token's position; empty mappings unless the request asks for
    them."""
    text: str
    finish_reason: str | None = None
    """Finish reason of the choice; None unless this part is its last."""
    stop_reason: int | str | None = None
    spans: Sequence[Mapping[str, Any]] = ()
    """Weight versions of the whole output; only in the last part."""
    is_first: bool = True
    by_token: Mapping[str, Any] = field(
        default_factory=partial(NO_ATTACHMENTS.json_fields, "token", 0)
    )
    """Attachments of the part's tokens, by their JSON fields; None unless the run's settings
    request them."""
    by_position: Mapping[str, Any] = field(
        default_factory=partial(NO_ATTACHMENTS.json_fields, "position")
    )
    """Attachments of all positions but the output's last token's, as arrays, likewise; all None but
    in the last part."""


@dataclass(slots=True, eq=False)
class OutputReader:
    """Reads one choice's output, each time from where it was read last."""

    choice: ActiveChoice
    stops: StopConditions
    tokenizer: OutputTokenizer
    labels: VersionLabels
    index: int = 0
    """Index of the choice within the answer."""
    finish_reason: str = "abort"
    """Finish reason of an output that was read to its end."""
    _read: int = 0
    """Number of tokens read so far."""
    _is_first: bool = True
    _sent: SentText = field(default_factory=SentText)
    _detokenizer: IncrementalDetokenizer = field(init=False)

    def __post_init__(self) -> None:
        skips = self.stops.skips_special_tokens
        self._detokenizer = IncrementalDetokenizer(
            partial(self.tokenizer.decode, skips_special_tokens=skips)
        )

    def more(self) -> Output | None:
        """Return the new output; None if there is none."""
        if self.choice.ended.done():
            return self.rest()
        turn = self.choice.current_turn()
        # A turn that has ended may have a stop token or string, which only `rest` cuts off.
        if turn is None or not turn.is_running or not (new := turn.token_ids_from(self._read)):
            return None
        tops = turn.top_logprobs_from(self._read)
        if self.choice.options.get("top_logprobs") and tops is None:
            return None  # they come with the next step
        return self._part(turn, new, tops, self._settled_text(new))

    def rest(self) -> Output:
        """Return the unread rest of an output that has ended, with its finish reason."""
        turn = self.choice.current_turn()
        if turn is None:
            return Output(self.index, [], [], [], "", "abort", is_first=self._is_first)
        ids, has_stopped = turn.token_ids, turn.finish_reason == "stop"
        whole = self.tokenizer.whole(ids, self.stops, has_stopped=has_stopped)
        if turn.finish_reason != "cancelled":
            self.finish_reason = turn.finish_reason
        return self._part(
            turn,
            ids[self._read :],
            turn.top_logprobs_from(self._read),
            self._sent.unsent(whole),
            finish_reason=self.finish_reason,
            stop_reason=self.tokenizer.stop_reason(ids, self.stops) if has_stopped else None,
            spans=self.labels.spans(turn),
            by_position=turn.json_fields("position"),
        )

    def _settled_text(self, token_ids: Sequence[int]) -> str:
        """Add new tokens; return the text that may be sent while the output runs.

        Incomplete characters are held back, and text that could be part of a stop string.
        """
        self._detokenizer.add(token_ids)
        settled = self._detokenizer.text
        held_back = max((len(s) for s in self.stops.stop_strings), default=1) - 1
        return self._sent.unsent(settled[: len(settled) - held_back])

    def _part(
        self,
        turn: "GeneratedTurn",
        token_ids: Sequence[int],
        tops: Sequence[TopLogprobs] | None,
        text: str,
        **end: Any,
    ) -> Output:
        """Return the part with the unread tokens of a turn, and count these as read."""
        start, self._read = self._read, self._read + len(token_ids)
        is_first, self._is_first = self._is_first, False
        return Output(
            self.index,
            token_ids,
            turn.logprobs_from(start),
            tops if tops is not None else [{}] * len(token_ids),
            text,
            is_first=is_first,
            by_token=turn.json_fields("token", start),
            **end,
        )
