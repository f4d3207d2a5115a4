"""What has a choice said since somebody looked last? Tokens, log-probs, text, and how it ended.

The same for all bodies that are made of it. It knows no HTTP.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tidegate.serving.vllm_server.desk import Choice
from tidegate.serving.vllm_server.labels import VersionLabels
from tidegate.serving.vllm_server.words import Ending, TextStream, Words

TopLogprobs = Mapping[int, float]
"""The likeliest tokens by id, likeliest first; the one that was sampled need not be among them."""


@dataclass(frozen=True, slots=True)
class Output:
    """A part of a choice's output, or all of it."""

    index: int
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    tops: Sequence[TopLogprobs]
    """For each token; each empty unless asked for."""
    text: str
    finish_reason: str | None = None
    """None while it goes on."""
    stop_reason: int | str | None = None
    spans: Sequence[Mapping[str, Any]] = ()
    """Of the whole output, once it has ended."""
    is_first: bool = True


@dataclass(slots=True, eq=False)
class OutputReader:
    """Reads one choice's output, from where it was read last."""

    choice: Choice
    ending: Ending
    words: Words
    labels: VersionLabels
    _read: int = 0
    _is_first: bool = True
    _text: TextStream = field(init=False)

    def __post_init__(self) -> None:
        self._text = TextStream(self.words, self.ending)

    def more(self) -> Output | None:
        """What is new; None if nothing is."""
        if self.choice.ended.done():
            return self.rest()
        if self.choice.num_tokens <= self._read or self.choice.row is None:
            return None
        turn = self.choice.turn_so_far()
        if turn is None:
            return None
        tops = turn.top_logprobs_from(self._read)
        if self.choice.options.get("top_logprobs") and tops is None:
            return None  # told with the next step
        text = self._text.more(turn.token_ids)
        return self._part(turn.token_ids, turn.logprobs, tops, text)

    def rest(self) -> Output:
        """What was not read of an output that has ended, and how it did."""
        turn = self.choice.turn_so_far()
        if turn is None:
            return self._part([], [], None, "", finish_reason="abort")
        has_stopped = turn.finish_reason == "stop"
        whole = self.words.whole(turn.token_ids, self.ending, has_stopped=has_stopped)
        reason = "abort" if turn.finish_reason == "cancelled" else turn.finish_reason
        return self._part(
            turn.token_ids,
            turn.logprobs,
            turn.top_logprobs_from(self._read),
            self._text.last(whole),
            finish_reason=reason,
            stop_reason=self.words.stop_reason(turn.token_ids, self.ending)
            if has_stopped
            else None,
            spans=self.labels.spans(turn),
        )

    def _part(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        tops: Sequence[TopLogprobs] | None,
        text: str,
        **about: Any,
    ) -> Output:
        start, self._read = self._read, len(token_ids)
        is_first, self._is_first = self._is_first, False
        new = slice(start, None)
        told = tops if tops is not None else [{}] * len(token_ids[new])
        return Output(
            self.choice.index,
            token_ids[new],
            logprobs[new],
            told,
            text,
            is_first=is_first,
            **about,
        )
