"""Response bodies of OpenAI's completions, whole and as chunks of a stream.

Pure functions from :class:`GeneratedTurn` to dicts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tidegate.orchestrator.episodes.generated_turn import GeneratedTurn
from tidegate.orchestrator.episodes.incremental_detokenizer import TokenTexts
from tidegate.serving.openai.requests import ChatRequest, OpenAIRequest
from tidegate.serving.openai.token_logprobs import (
    as_ids,
    chat_logprobs,
    completion_logprobs,
    turn_rows,
)


@dataclass(frozen=True, slots=True)
class FinishedChoice:
    """One choice of an answer: its turn, and the prompt that the turn continued."""

    turn: GeneratedTurn
    prompt_tokens: int
    prompt_token_ids: list[int] | None
    """Token ids of the prompt; None unless the request asked for token ids."""


def completion(
    request: OpenAIRequest,
    answers: Sequence[FinishedChoice],
    *,
    name: str,
    created_s: int,
) -> dict[str, Any]:
    """Return the body of the whole answer."""
    choices = [_choice(request, n, answer) for n, answer in enumerate(answers)]
    body = {
        **_head(request, name, created_s),
        "choices": choices,
        "usage": usage(request, answers),
    }
    if not request.return_token_ids:
        return body
    if isinstance(request, ChatRequest):  # vLLM's answer has it once only
        return {**body, "prompt_token_ids": answers[0].prompt_token_ids}
    for choice, answer in zip(choices, answers, strict=True):
        choice["prompt_token_ids"] = answer.prompt_token_ids
    return body


def generated_tokens(
    request: OpenAIRequest,
    answers: Sequence[FinishedChoice],
    *,
    name: str,
    created_s: int,
) -> dict[str, Any]:
    """Return the body that answers ``/inference/v1/generate``, as vLLM writes it."""
    return {
        "request_id": name,
        "model": request.model or "policy",
        "created": created_s,
        "usage": usage(request, answers),
        "prompt_token_ids": answers[0].prompt_token_ids,
        "output_mode": "tokens",
        "choices": [_generated_choice(request, n, each.turn) for n, each in enumerate(answers)],
    }


def _generated_choice(request: OpenAIRequest, index: int, turn: GeneratedTurn) -> dict[str, Any]:
    content = [as_ids(i, p, {i: p, **top}, likeliest=top) for i, p, top in turn_rows(turn)]
    return {
        "index": index,
        "finish_reason": turn.finish_reason,
        "token_ids": turn.token_ids,
        "logprobs": None if request.num_top_logprobs is None else {"content": content},
        "weight_versions": weight_versions(turn),
    }


def usage(request: OpenAIRequest, answers: Sequence[FinishedChoice]) -> dict[str, int]:
    """Return ``usage``; each prompt is counted once, however many choices it has."""
    prompts = answers[:: request.choices_per_prompt]
    prompt = sum(answer.prompt_tokens for answer in prompts)
    output = sum(len(answer.turn.token_ids) for answer in answers)
    return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}


def _head(
    request: OpenAIRequest, name: str, created_s: int, *, is_chunk: bool = False
) -> dict[str, Any]:
    is_chat = isinstance(request, ChatRequest)
    kind = "chat.completion" + ".chunk" * is_chunk if is_chat else "text_completion"
    prefix = "chatcmpl-" if is_chat else "cmpl-"
    return {
        "id": prefix + name,
        "object": kind,
        "created": created_s,
        "model": request.model or "policy",
    }


def _choice(request: OpenAIRequest, index: int, answer: FinishedChoice) -> dict[str, Any]:
    turn = answer.turn
    choice: dict[str, Any] = {"index": index, "finish_reason": _finish_reason(turn)}
    if isinstance(request, ChatRequest):
        message = dict(turn.message or {})
        if message.get("tool_calls") and not message.get("content"):
            message["content"] = None
        choice["message"] = message
        choice["logprobs"] = chat_logprobs(request, turn)
    else:
        choice["text"] = turn.text
        choice["logprobs"] = _plain_logprobs(request, turn)
    return choice | _tokens(request, turn)


def _finish_reason(turn: GeneratedTurn) -> str:
    return "tool_calls" if turn.tool_calls else turn.finish_reason


def _tokens(request: OpenAIRequest, turn: GeneratedTurn) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if request.return_token_ids:
        fields["token_ids"] = turn.token_ids
    if request.return_token_ids or request.return_weight_versions:
        fields["weight_versions"] = weight_versions(turn)
    return fields


def weight_versions(turn: GeneratedTurn) -> list[dict[str, Any]]:
    """Return the weight version of each range of the turn's tokens."""
    return [
        {"version": str(span.version), "start": span.start, "end": span.end} for span in turn.spans
    ]


def _plain_logprobs(request: OpenAIRequest, turn: GeneratedTurn) -> dict[str, Any] | None:
    if request.num_top_logprobs is None:
        return None
    texts = TokenTexts(turn.tokenizer)
    shows_ids = request.return_tokens_as_token_ids
    return completion_logprobs(texts, turn_rows(turn), shows_ids=shows_ids)


# ---------------------------------------------------------------- chunks of a stream


def text_chunk(
    request: OpenAIRequest,
    index: int,
    text: str,
    *,
    name: str,
    created_s: int,
    is_first: bool = False,
    prompt_token_ids: list[int] | None = None,
) -> dict[str, Any]:
    """Return the chunk with more of one choice's text, and the prompt's tokens if given."""
    choice: dict[str, Any] = {"index": index, "finish_reason": None, "logprobs": None}
    body = {**_head(request, name, created_s, is_chunk=True), "choices": [choice]}
    if isinstance(request, ChatRequest):
        role = {"role": "assistant"} if is_first else {}
        choice["delta"] = {**role, "content": text}
    else:
        choice["text"] = text
    if prompt_token_ids is not None:
        holder = body if isinstance(request, ChatRequest) else choice
        holder["prompt_token_ids"] = prompt_token_ids
    return body


def last_chunk(
    request: OpenAIRequest,
    index: int,
    answer: FinishedChoice,
    *,
    name: str,
    created_s: int,
) -> dict[str, Any]:
    """Return the chunk that ends a choice: tool calls, log-probs and finish reason."""
    whole = _choice(request, index, answer)
    if isinstance(request, ChatRequest):
        message = whole.pop("message")
        calls = [{"index": n, **call} for n, call in enumerate(message.get("tool_calls", []))]
        whole["delta"] = {"tool_calls": calls} if calls else {}
    else:
        whole["text"] = ""
    return {**_head(request, name, created_s, is_chunk=True), "choices": [whole]}


def usage_chunk(
    request: OpenAIRequest, answers: Sequence[FinishedChoice], *, name: str, created_s: int
) -> dict[str, Any]:
    """Return the chunk of a stream that reports its usage."""
    head = _head(request, name, created_s, is_chunk=True)
    return {**head, "choices": [], "usage": usage(request, answers)}
