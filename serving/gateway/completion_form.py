"""OpenAI's form of the answer to a completion, whole and as chunks of a stream."""

from collections.abc import Iterator
from typing import Any

from typing_extensions import override

from tidegate.orchestrator.episodes.generated_turn import GeneratedTurn
from tidegate.orchestrator.episodes.incremental_detokenizer import TokenTexts
from tidegate.serving.http.errors import OpenAIErrors
from tidegate.serving.http.scaffold import DONE_EVENT, stream_event
from tidegate.serving.openai.answers import ActiveCompletion, AnswerForm
from tidegate.serving.openai.requests import ChatRequest, OpenAIRequest
from tidegate.serving.openai.token_logprobs import (
    as_ids,
    chat_logprobs,
    completion_logprobs,
    turn_rows,
)


class CompletionForm(AnswerForm):
    """OpenAI's chat and text completions."""

    def body(self, active: ActiveCompletion) -> dict[str, Any]:
        """Return the whole answer."""
        choices = [_choice(active, index) for index in range(len(active.choices))]
        body = {**_head(active), "choices": choices, "usage": _usage(active)}
        if not active.request.return_token_ids:
            return body
        if isinstance(active.request, ChatRequest):  # vLLM's answer has it once only
            return {**body, "prompt_token_ids": active.choices[0].prompt()}
        for choice, turn in zip(choices, active.choices, strict=True):
            choice["prompt_token_ids"] = turn.prompt()
        return body

    def first_events(self, active: ActiveCompletion) -> Iterator[bytes]:
        """Yield each choice's first chunk, which has no text."""
        is_chat = isinstance(active.request, ChatRequest)
        for index, choice in enumerate(active.choices):
            chunk = _text_chunk(active, index, "")
            if is_chat:
                chunk["choices"][0]["delta"] = {"role": "assistant", "content": ""}
            if active.request.return_token_ids:
                holder = chunk if is_chat else chunk["choices"][0]
                holder["prompt_token_ids"] = choice.prompt()
            yield stream_event(chunk)

    def reasoning_events(
        self, active: ActiveCompletion, index: int, reasoning: str
    ) -> Iterator[bytes]:
        """Yield one chunk."""
        chunk = _text_chunk(active, index, "")
        chunk["choices"][0]["delta"] = {"reasoning_content": reasoning}
        yield stream_event(chunk)

    def text_events(self, active: ActiveCompletion, index: int, text: str) -> Iterator[bytes]:
        """Yield one chunk."""
        yield stream_event(_text_chunk(active, index, text))

    def last_events(self, active: ActiveCompletion) -> Iterator[bytes]:
        """Yield each choice's tool calls, log-probs and finish reason; then the usage if it was
        asked for."""
        for index in range(len(active.choices)):
            choice = _choice(active, index)
            if isinstance(active.request, ChatRequest):
                calls = choice.pop("message").get("tool_calls", [])
                numbered = [{"index": n, **call} for n, call in enumerate(calls)]
                choice["delta"] = {"tool_calls": numbered} if numbered else {}
            else:
                choice["text"] = ""
            yield stream_event({**_head(active, is_chunk=True), "choices": [choice]})
        if (active.request.stream_options or {}).get("include_usage"):
            usage = {"choices": [], "usage": _usage(active)}
            yield stream_event({**_head(active, is_chunk=True), **usage})
        yield DONE_EVENT

    def error_events(self, error: Exception) -> Iterator[bytes]:
        """Yield the error's body."""
        form = OpenAIErrors()
        yield stream_event(form.body(form.answer_to(error)))
        yield DONE_EVENT


class TokensForm(CompletionForm):
    """vLLM's answer to ``/inference/v1/generate``; never a stream."""

    @override
    def body(self, active: ActiveCompletion) -> dict[str, Any]:
        """Return the whole answer."""
        has_logprobs = active.request.num_top_logprobs is not None

        def choice_of(index: int, turn: GeneratedTurn) -> dict[str, Any]:
            content = [as_ids(i, p, {i: p, **top}, likeliest=top) for i, p, top in turn_rows(turn)]
            return {
                "index": index,
                "finish_reason": turn.finish_reason,
                "token_ids": turn.token_ids,
                "logprobs": {"content": content} if has_logprobs else None,
                "weight_versions": active.weight_versions(turn),
            }

        return {
            "request_id": active.name,
            "model": active.request.model or "policy",
            "created": active.created_s,
            "usage": _usage(active),
            "prompt_token_ids": active.choices[0].prompt()
            if active.request.return_token_ids
            else None,
            "output_mode": "tokens",
            "choices": [choice_of(n, each.turn.result()) for n, each in enumerate(active.choices)],
        }


def _head(active: ActiveCompletion, *, is_chunk: bool = False) -> dict[str, Any]:
    is_chat = isinstance(active.request, ChatRequest)
    kind = "chat.completion" + ".chunk" * is_chunk if is_chat else "text_completion"
    return {
        "id": ("chatcmpl-" if is_chat else "cmpl-") + active.name,
        "object": kind,
        "created": active.created_s,
        "model": active.request.model or "policy",
    }


def _usage(active: ActiveCompletion) -> dict[str, int]:
    """Return ``usage``; each prompt is counted once, however many choices it has."""
    prompts = active.choices[:: active.request.choices_per_prompt]
    prompt = sum(choice.prompt_tokens for choice in prompts)
    output = sum(len(choice.turn.result().token_ids) for choice in active.choices)
    return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}


def _choice(active: ActiveCompletion, index: int) -> dict[str, Any]:
    """Return a choice whose turn has ended."""
    request, turn = active.request, active.choices[index].turn.result()
    reason = "tool_calls" if turn.tool_calls else turn.finish_reason
    choice: dict[str, Any] = {"index": index, "finish_reason": reason}
    if isinstance(request, ChatRequest):
        message = dict(turn.message or {})
        if message.get("tool_calls") and not message.get("content"):
            message["content"] = None
        choice["message"] = message
        choice["logprobs"] = chat_logprobs(request, turn)
    else:
        choice["text"] = turn.text
        choice["logprobs"] = _plain_logprobs(request, turn)
    if request.return_token_ids:
        choice["token_ids"] = turn.token_ids
    if request.return_token_ids or request.return_weight_versions:
        choice["weight_versions"] = active.weight_versions(turn)
    return choice


def _plain_logprobs(request: OpenAIRequest, turn: GeneratedTurn) -> dict[str, Any] | None:
    if request.num_top_logprobs is None:
        return None
    texts = TokenTexts(turn.tokenizer)
    shows_ids = request.return_tokens_as_token_ids
    return completion_logprobs(texts, turn_rows(turn), shows_ids=shows_ids)


def _text_chunk(active: ActiveCompletion, index: int, text: str) -> dict[str, Any]:
    """Return the chunk with more of one choice's text."""
    is_chat = isinstance(active.request, ChatRequest)
    added: dict[str, Any] = {"delta": {"content": text}} if is_chat else {"text": text}
    choice = {"index": index, "finish_reason": None, "logprobs": None, **added}
    return {**_head(active, is_chunk=True), "choices": [choice]}
