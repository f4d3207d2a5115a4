"""Parser of SGLang's stream messages, which are cumulative: each has all tokens so far.

Used by ``SglangAdapter``.
"""

from collections.abc import Sequence
from typing import Any

from tidegate.engine.external.adapter import Ended, GeneratedChunk, TopLogprobs, VersionLabel
from tidegate.errors import EngineGone


def read_chunk(
    message: dict[str, Any], known_tokens: int, stop_ids: frozenset[int], *, with_top: int
) -> GeneratedChunk:
    """Return the new tokens of a message, up to a stop token; ``known_tokens`` tokens are known."""
    meta = message["meta_info"]
    entries = meta["output_token_logprobs"][known_tokens:]
    ended = _ended(meta.get("finish_reason"))
    labels = None
    if ended is not None and meta.get("weight_versions") is not None:
        labels = _labels(meta["weight_versions"])
    for index, (_, token_id, *_) in enumerate(entries):
        if token_id in stop_ids:
            if labels is not None and index + 1 < len(entries):
                labels = None  # they cover tokens that are cut off
            entries, ended = entries[: index + 1], "stop"
            break
    top = None
    if with_top and entries:
        top = read_top(meta["output_top_logprobs"][known_tokens : known_tokens + len(entries)])
    return GeneratedChunk(
        token_ids=[entry[1] for entry in entries],
        logprobs=[entry[0] for entry in entries],
        ended=ended,
        labels=labels,
        top=top,
    )


def _labels(spans: Sequence[dict[str, Any]]) -> list[VersionLabel]:
    """Drop the empty span that SGLang reports for a request aborted before its first token."""
    labels = (VersionLabel(span["version"], span["start"], span["end"]) for span in spans)
    return [label for label in labels if label.end > label.start]


def _ended(reason: dict[str, Any] | None) -> Ended | None:
    if reason is None:
        return None
    match reason["type"]:
        case "length" | "stop" | "abort" as ended:
            return ended  # type: ignore[no-any-return]
    raise EngineGone(f"SGLang ended a request with an unknown finish reason: {reason}")


def read_top(positions: Sequence[Sequence[Sequence[Any]]]) -> TopLogprobs:
    """Return the top log-probs of some positions."""
    entries = [entry for position in positions for entry in position]
    return TopLogprobs([entry[1] for entry in entries], [entry[0] for entry in entries])
