"""Log-probs of sampled tokens in the forms of OpenAI's and vLLM's APIs."""

import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from tidegate.orchestrator.episodes.generated_turn import GeneratedTurn
from tidegate.orchestrator.episodes.incremental_detokenizer import TokenTexts
from tidegate.serving.openai.requests import OpenAIRequest

LogprobRow = tuple[int, float | None, Mapping[int, float] | None]
"""A token, its log-prob, and those of the likeliest tokens; None for a prompt's first token."""


def as_ids(
    token: int, logprob: float, top: dict[int, float], likeliest: Collection[int]
) -> dict[str, Any]:
    """Return the log-prob entry of a token as ``/inference/v1/generate`` has it.

    ``top`` begins with the token itself; ``likeliest`` are the likeliest tokens in their order.
    """
    ranks = {token: rank for rank, token in enumerate(likeliest, 1)}

    def entry_of(token: int, logprob: float) -> dict[str, Any]:
        # vLLM 0.32 has the id; verifiers' TrainClient 0.4 reads it from the text.
        text = f"token_id:{token}"
        return {"token_id": token, "token": text, "logprob": logprob, "rank": ranks.get(token)}

    return {**entry_of(token, logprob), "top_logprobs": [entry_of(*pair) for pair in top.items()]}


def chat_content(
    texts: TokenTexts,
    rows: Sequence[tuple[int, float, Mapping[int, float]]],
    *,
    shows_ids: bool | None = False,
    is_end: bool = True,
) -> list[dict[str, Any]]:
    """Return the log-prob entries of an output's next tokens as OpenAI's chat has them; the
    arguments are those of :func:`completion_logprobs`."""

    def entry(token: int, name: str, logprob: float, raw: bytes) -> dict[str, Any]:
        name = f"token_id:{token}" if shows_ids else name
        return {"token": name, "logprob": logprob, "bytes": list(raw)}

    entries = []
    for number, (token, logprob, top) in enumerate(rows, 1):
        sampled = texts.add(token, is_last=is_end and number == len(rows))
        names = zip(texts.names(token, sampled, top), top.items(), strict=True)
        tops = [
            entry(each, name, p, sampled.raw if each == token else texts.raw(each))
            for name, (each, p) in names
        ]
        own = entry(token, sampled.text, logprob, sampled.raw)
        entries.append({**own, "top_logprobs": tops})
    return entries


def completion_logprobs(
    texts: TokenTexts,
    rows: Sequence[LogprobRow],
    *,
    start: int = 0,
    shows_ids: bool | None = False,
    is_end: bool = True,
) -> dict[str, Any]:
    """Return the log-probs of an output's next tokens as OpenAI's completions have them.

    ``start``: characters before the first one. ``shows_ids``: whether tokens are named by ids.
    ``is_end``: whether these are the output's last tokens.
    """
    names: list[str] = []
    tops: list[dict[str, float] | None] = []
    for number, (token, _, top) in enumerate(rows, 1):
        sampled = texts.add(token, is_last=is_end and number == len(rows))
        names.append(f"token_id:{token}" if shows_ids else sampled.text)
        if top is None:
            tops.append(None)
            continue
        listed = texts.names(token, sampled, top)
        if shows_ids:
            listed = [f"token_id:{each}" for each in top]
        tops.append(dict(zip(listed, top.values(), strict=True)))
    return {
        "text_offset": list(itertools.accumulate(map(len, names), initial=start))[:-1],
        "token_logprobs": [logprob for _, logprob, _ in rows],
        "tokens": names,
        "top_logprobs": tops,
    }


def turn_rows(turn: GeneratedTurn) -> list[tuple[int, float, Mapping[int, float]]]:
    """Return each token of a turn, its log-prob, and those of the likeliest."""
    tops = turn.top_logprobs or [{}] * len(turn.token_ids)
    return list(zip(turn.token_ids, turn.logprobs, tops, strict=True))


def chat_logprobs(request: OpenAIRequest, turn: GeneratedTurn) -> dict[str, Any] | None:
    """Return the log-probs of a chat's turn in OpenAI's form; None unless requested."""
    if request.num_top_logprobs is None:
        return None
    texts = TokenTexts(turn.tokenizer)
    shows_ids = request.return_tokens_as_token_ids
    content = chat_content(texts, turn_rows(turn), shows_ids=shows_ids)
    return {"content": content, "refusal": None}


def plain_logprobs(request: OpenAIRequest, turn: GeneratedTurn) -> dict[str, Any] | None:
    """Return the log-probs of a text completion's turn in OpenAI's form; None unless requested."""
    if request.num_top_logprobs is None:
        return None
    texts = TokenTexts(turn.tokenizer)
    shows_ids = request.return_tokens_as_token_ids
    return completion_logprobs(texts, turn_rows(turn), shows_ids=shows_ids)
