"""OpenAI's form of the answer to a completion, whole and as chunks of a stream."""

from collections.abc import Iterator
from typing import Any

from typing_extensions import override

from tidegate.orchestrator.episodes.generated_turn import GeneratedTurn
from tidegate.serving.http.errors import OpenAIErrors
from tidegate.serving.http.scaffold import DONE_EVENT, stream_event
from tidegate.serving.openai.answers import AnswerForm
from tidegate.serving.openai.requests import ChatRequest
from tidegate.serving.openai.token_logprobs import (
    as_ids,
    chat_logprobs,
    plain_logprobs,
    turn_rows,
)


class CompletionForm(AnswerForm):
    """OpenAI's chat and text completions."""

    @override
    def body(self) -> dict[str, Any]:
        choices = [self._choice(index) for index in range(len(self.active.choices))]
        body = {**self._head(), "choices": choices, "usage": self._usage()}
        if not self.active.request.return_token_ids:
            return body
        if isinstance(self.active.request, ChatRequest):  # vLLM's answer has it once only
            return {**body, "prompt_token_ids": self.active.choices[0].prompt()}
        for choice, turn in zip(choices, self.active.choices, strict=True):
            choice["prompt_token_ids"] = turn.prompt()
        return body

    def first_events(self) -> Iterator[bytes]:
        """Yield each choice's first chunk, which has no text."""
        is_chat = isinstance(self.active.request, ChatRequest)
        for index, choice in enumerate(self.active.choices):
            chunk = self._text_chunk(index, "")
            if is_chat:
                chunk["choices"][0]["delta"] = {"role": "assistant", "content": ""}
            if self.active.request.return_token_ids:
                holder = chunk if is_chat else chunk["choices"][0]
                holder["prompt_token_ids"] = choice.prompt()
            yield stream_event(chunk)

    @override
    def reasoning_events(self, index: int, reasoning: str) -> Iterator[bytes]:
        chunk = self._text_chunk(index, "")
        chunk["choices"][0]["delta"] = {"reasoning_content": reasoning}
        yield stream_event(chunk)

    @override
    def text_events(self, index: int, text: str) -> Iterator[bytes]:
        yield stream_event(self._text_chunk(index, text))

    def last_events(self) -> Iterator[bytes]:
        """Yield each choice's tool calls, log-probs and finish reason; then the usage if it was
        asked for."""
        for index in range(len(self.active.choices)):
            choice = self._choice(index)
            if isinstance(self.active.request, ChatRequest):
                calls = choice.pop("message").get("tool_calls", [])
                numbered = [{"index": n, **call} for n, call in enumerate(calls)]
                choice["delta"] = {"tool_calls": numbered} if numbered else {}
            else:
                choice["text"] = ""
            yield stream_event({**self._head(is_chunk=True), "choices": [choice]})
        if (self.active.request.stream_options or {}).get("include_usage"):
            usage = {"choices": [], "usage": self._usage()}
            yield stream_event({**self._head(is_chunk=True), **usage})
        yield DONE_EVENT

    @override
    def error_events(self, error: Exception) -> Iterator[bytes]:
        form = OpenAIErrors()
        yield stream_event(form.body(form.answer_to(error)))
        yield DONE_EVENT

    def _head(self, *, is_chunk: bool = False) -> dict[str, Any]:
        is_chat = isinstance(self.active.request, ChatRequest)
        kind = "chat.completion" + ".chunk" * is_chunk if is_chat else "text_completion"
        return {
            "id": ("chatcmpl-" if is_chat else "cmpl-") + self.active.name,
            "object": kind,
            "created": self.active.created_s,
            "model": self.active.request.model or "policy",
        }

    def _usage(self) -> dict[str, int]:
        """Return ``usage``; each prompt is counted once, however many choices it has."""
        prompts = self.active.choices[:: self.active.request.choices_per_prompt]
        prompt = sum(choice.prompt_tokens for choice in prompts)
        output = sum(len(choice.turn.result().token_ids) for choice in self.active.choices)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
        }

    def _choice(self, index: int) -> dict[str, Any]:
        request, turn = self.active.request, self.active.choices[index].turn.result()
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
            choice["logprobs"] = plain_logprobs(request, turn)
        if request.return_token_ids:
            choice["token_ids"] = turn.token_ids
        if request.return_token_ids or request.return_weight_versions:
            choice["weight_versions"] = self.active.weight_versions(turn)
        return choice

    def _text_chunk(self, index: int, text: str) -> dict[str, Any]:
        is_chat = isinstance(self.active.request, ChatRequest)
        added: dict[str, Any] = {"delta": {"content": text}} if is_chat else {"text": text}
        choice = {"index": index, "finish_reason": None, "logprobs": None, **added}
        return {**self._head(is_chunk=True), "choices": [choice]}


class TokensForm(CompletionForm):
    """vLLM's answer to ``/inference/v1/generate``; never a stream."""

    @override
    def body(self) -> dict[str, Any]:
        request, choices = self.active.request, self.active.choices

        def choice_of(index: int, turn: GeneratedTurn) -> dict[str, Any]:
            content = [as_ids(i, p, {i: p, **top}, likeliest=top) for i, p, top in turn_rows(turn)]
            return {
                "index": index,
                "finish_reason": turn.finish_reason,
                "token_ids": turn.token_ids,
                "logprobs": None if request.num_top_logprobs is None else {"content": content},
                "weight_versions": self.active.weight_versions(turn),
            }

        return {
            "request_id": self.active.name,
            "model": request.model or "policy",
            "created": self.active.created_s,
            "usage": self._usage(),
            "prompt_token_ids": choices[0].prompt() if request.return_token_ids else None,
            "output_mode": "tokens",
            "choices": [choice_of(n, turn.turn.result()) for n, turn in enumerate(choices)],
        }
