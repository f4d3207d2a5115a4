"""Answers of vLLM's three kinds of completion, written from parts of the choices' outputs.

:class:`OutputsAnswer` reads the outputs, for SGLang's answers, too.
"""

import asyncio
import base64
import io
import itertools
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
from typing_extensions import override

from tidegate.orchestrator.episodes.incremental_detokenizer import TokenTexts
from tidegate.serving.http.errors import VllmErrors
from tidegate.serving.http.scaffold import DONE_EVENT, stream_event
from tidegate.serving.openai.active_requests import ActiveRequest, RequestCounts
from tidegate.serving.openai.answers import PendingAnswer, ServedTurn
from tidegate.serving.openai.outputs import Output, OutputReader, OutputTokenizer
from tidegate.serving.openai.requests import ChatRequest, CompletionRequest, GenerateRequest, Prompt
from tidegate.serving.openai.token_logprobs import (
    LogprobRow,
    as_ids,
    chat_content,
    completion_logprobs,
)

PromptLogprobs = list[dict[str, Any] | None]

RequestT = TypeVar("RequestT", GenerateRequest, CompletionRequest, ChatRequest)


# ---------------------------------------------------------------- of vLLM's and SGLang's APIs


@dataclass(frozen=True, slots=True)
class BegunRequest:
    """A request whose choices are being generated, and the facts that its answer reports."""

    request: ActiveRequest
    model: str
    tokenizer: OutputTokenizer
    readers: Sequence[OutputReader]
    """Reader of each choice's output; none if the request is for log-probs of its prompt alone."""
    first_index: int
    """Index of the first choice within the answer."""
    prompts: Sequence[Prompt]
    """The prompt of each choice."""
    prompt_logprobs: Sequence[PromptLogprobs | None]
    """The log-probs of each choice's prompt."""
    choices_per_prompt: int
    top_logprobs: int
    counts: RequestCounts

    @property
    def prompt_tokens(self) -> int:
        """Number of prompt tokens; a prompt is counted once, whatever its choices."""
        return sum(len(p.token_ids) for p in self.prompts[:: self.choices_per_prompt])

    @property
    def reported_tokens(self) -> int:
        """Size of the answer, in tokens and listed log-probs; large answers are encoded in a
        thread."""
        choices = self.request.choices
        outputs = sum(choice.num_tokens for choice in choices) * (1 + self.top_logprobs)
        return outputs + sum(len(choice.prompt.token_ids) for choice in choices)

    @property
    def finish_reasons(self) -> list[str]:
        """Finish reason of each output, all of which were read to their ends."""
        if not self.readers:
            return ["abort" if self.request.aborted_before_start else "length"]
        return [reader.finish_reason for reader in self.readers]

    def rest(self) -> list[Output]:
        """Return the unread rest of each output; an empty output if there is no choice."""
        if not self.readers:
            return [Output(self.first_index, [], [], [], "", self.finish_reasons[0])]
        return [reader.rest() for reader in self.readers]

    def count(self) -> None:
        """Count the answered request in ``/metrics``."""
        self.counts.count(
            began_s=self.request.began_s,
            prompt_tokens=self.prompt_tokens,
            finish_reasons=self.finish_reasons,
        )


async def running_outputs(readers: Sequence[OutputReader]) -> AsyncIterator[Output]:
    """Yield parts of all choices as they come; the last part of each has its finish reason.

    Tokens that come while the caller sends a part travel together in the next one.
    """
    running, new_tokens = dict.fromkeys(readers), asyncio.Event()
    for reader in readers:
        reader.choice.subscribe(new_tokens)
    new_tokens.set()  # some may have come already
    while running:
        await new_tokens.wait()
        new_tokens.clear()
        for reader in list(running):
            if reader.choice.ended.done():
                del running[reader]
            if reader.choice.error is None and (output := reader.more()) is not None:
                yield output


class OutputsAnswer(PendingAnswer):
    """Answer that is written from the outputs of one or several requests."""

    def __init__(self, *begun: BegunRequest) -> None:
        self.begun = begun

    @override
    async def wait(self) -> None:
        for each in self.begun:
            await each.request.wait()

    @override
    def abort(self) -> None:
        for each in self.begun:
            each.request.abort()

    @property
    @override
    def num_tokens(self) -> int:
        return sum(each.reported_tokens for each in self.begun)

    @override
    def ended(self) -> None:
        for each in self.begun:
            each.count()

    @override
    def encode(self) -> bytes:
        return self.whole([output for each in self.begun for output in each.rest()])

    @override
    async def events(self) -> AsyncGenerator[bytes, None]:
        for body in self.opening:
            yield stream_event(body)
        async for output in running_outputs([r for each in self.begun for r in each.readers]):
            yield stream_event(self.chunk(output))
        await self.wait()
        for begun in self.begun:
            if not begun.readers:
                yield stream_event(self.chunk(*begun.rest()))
        for body in self.closing:
            yield stream_event(body)
        self.ended()
        yield DONE_EVENT

    @override
    def error_events(self, error: Exception) -> Iterator[bytes]:
        yield stream_event(self.error(error))
        yield DONE_EVENT

    def whole(self, outputs: Sequence[Output]) -> bytes:
        """Return the whole answer as JSON, from the outputs of all choices."""
        raise NotImplementedError

    @property
    def opening(self) -> list[dict[str, Any]]:
        """Return the chunks that a stream begins with, before any token."""
        return []

    def chunk(self, output: Output) -> dict[str, Any]:
        """Return the chunk of a stream with a part of one choice's output."""
        raise NotImplementedError

    @property
    def closing(self) -> list[dict[str, Any]]:
        """Return the chunks that a stream ends with, after all tokens."""
        return []

    def error(self, error: Exception) -> dict[str, Any]:
        """Return the event of an error in a stream."""
        form = VllmErrors()
        return form.body(form.answer_to(error))


# ---------------------------------------------------------------- vLLM's


def _usage(prompt_tokens: int, output_tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + output_tokens,
        "completion_tokens": output_tokens,
    }


WITHOUT_DETAILS = {"prompt_tokens_details": None, "completion_tokens_details": None}
WITHOUT_TRANSFERS = {"kv_transfer_params": None, "ec_transfer_params": None, "metrics": None}


class ResponseBodies(OutputsAnswer, Generic[RequestT]):
    """Answer to one request in vLLM's form."""

    def __init__(self, begun: BegunRequest, request: RequestT) -> None:
        super().__init__(begun)
        self._request: RequestT = request
        self._begun = begun
        self._id, self._created_s = begun.request.request_id, begun.request.created_s
        self._token_texts: dict[int, TokenTexts] = {}
        """Texts of the tokens reported so far, by choice."""
        options = request.stream_options or {}
        self._wants_usage = bool(options.get("include_usage"))
        self._wants_chunk_usage = self._wants_usage and bool(options.get("continuous_usage_stats"))
        self._sent_tokens: Counter[int] = Counter()
        """Number of tokens sent so far, by choice."""

    @property
    @override
    def is_stream(self) -> bool:
        return bool(self._request.stream)

    @override
    def whole(self, outputs: Sequence[Output]) -> bytes:
        tokens = sum(len(output.token_ids) for output in outputs)
        body = self._body(outputs, _usage(self._begun.prompt_tokens, tokens) | WITHOUT_DETAILS)
        # One by one, because the encoder holds the interpreter until it is done.
        body["choices"] = [msgspec.Raw(msgspec.json.encode(each)) for each in body["choices"]]
        return msgspec.json.encode(body)

    @override
    def chunk(self, output: Output) -> dict[str, Any]:
        chunk = self._chunk(output)
        if self._wants_chunk_usage:
            self._sent_tokens[output.index] += len(output.token_ids)
            prompt_tokens = len(self._begun.prompts[output.index].token_ids)
            chunk["usage"] = _usage(prompt_tokens, self._sent_tokens[output.index])
        return chunk

    @property
    @override
    def closing(self) -> list[dict[str, Any]]:
        if not self._wants_usage:
            return []
        tokens = sum(choice.num_tokens for choice in self._begun.request.choices)
        usage = _usage(self._begun.prompt_tokens, tokens)
        return [{**self._chunk_head, "choices": [], "usage": usage}]

    def _body(self, outputs: Sequence[Output], usage: dict[str, Any]) -> dict[str, Any]:
        raise NotImplementedError

    def _chunk(self, output: Output) -> dict[str, Any]:
        raise NotImplementedError

    @property
    def _chunk_head(self) -> dict[str, Any]:
        """Fields that every chunk begins with."""
        raise NotImplementedError

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created_s,
            "model": self._begun.model,
        }

    def _texts(self, index: int) -> TokenTexts:
        """Return the texts of a choice's tokens, which its log-probs show one by one."""
        if index not in self._token_texts:
            self._token_texts[index] = self._begun.tokenizer.token_texts()
        return self._token_texts[index]


# ---------------------------------------------------------------- tokens in, tokens out


class GenerateBodies(ResponseBodies[GenerateRequest]):
    """Writer of the answers, whole and streamed, of vLLM's ``/inference/v1/generate``."""

    @override
    def _body(self, outputs: Sequence[Output], usage: dict[str, Any]) -> dict[str, Any]:
        begun, wants_prompt = self._begun, self._request.return_token_ids
        return {
            "request_id": self._id,
            "model": begun.model,
            "created": self._created_s,
            "usage": usage,
            "prompt_logprobs": begun.prompt_logprobs[0],
            "prompt_token_id_logprobs": None,
            "prompt_token_ids": begun.prompts[0].token_ids if wants_prompt else None,
            "mm_placeholders": None,
            **WITHOUT_TRANSFERS,
            "output_mode": self._request.output_mode,
            "choices": [self._choice(output) for output in outputs],
        }

    @override
    def _chunk(self, output: Output) -> dict[str, Any]:
        choice = self._choice(output)
        if output.finish_reason is None:
            choice["weight_versions"] = None
        return {**self._chunk_head, "usage": None, "choices": [choice]}

    @property
    @override
    def _chunk_head(self) -> dict[str, Any]:
        return {"request_id": self._id, "output_mode": self._request.output_mode}

    def _choice(self, output: Output) -> dict[str, Any]:
        sampling = self._request.sampling_params
        choice: dict[str, Any] = {
            "index": output.index,
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
            "token_ids": output.token_ids,
            **as_json(output.by_position, self._encoded, sampling.positions_from),
            **output.by_token,
            "weight_versions": output.spans,
        }
        if self._request.output_mode == "text":
            choice["text"] = output.text
        choice["logprobs"] = self._logprobs(output)
        return choice

    def _encoded(self, entries: npt.NDArray[Any]) -> Any:
        return as_npy(entries)

    def _logprobs(self, output: Output) -> dict[str, Any] | None:
        if self._request.sampling_params.logprobs is None:
            return None
        if self._request.output_mode == "text":
            texts = self._texts(output.index)
            is_end = output.finish_reason is not None
            return {"content": chat_content(texts, _rows(output), is_end=is_end)}
        rows = zip(_rows(output), output.tops, strict=True)
        return {"content": [as_ids(*row, likeliest) for row, likeliest in rows]}


class PackedBodies(GenerateBodies):
    """Writer of the answers of ``/skyrl/v1/generate``, by SkyRL's ``generate_wire.py``.

    An array is an object whose first key is ``data``, base64 of its bytes. SkyRL's client cuts
    that out of the JSON before it is parsed, so the JSON has no spaces.
    """

    @override
    def _encoded(self, entries: npt.NDArray[Any]) -> Any:
        # The smallest dtype that SkyRL has; its decoder refuses any other.
        dtype = "uint8" if int(entries.max(initial=0)) < 1 << 8 else "int16"
        data = base64.b64encode(entries.astype(dtype).tobytes()).decode()
        return {"data": data, "shape": list(entries.shape), "dtype": dtype}


def as_npy(values: npt.NDArray[Any]) -> str:
    """Return an array as JSON text: base64 of a .npy file."""
    file = io.BytesIO()
    np.save(file, values, allow_pickle=False)
    return base64.b64encode(file.getvalue()).decode()


def as_json(
    by_position: Mapping[str, Any],
    encode: Callable[[npt.NDArray[Any]], Any] = as_npy,
    start: int = 0,
) -> dict[str, Any]:
    """Return attachments by position, those from position ``start`` on, as JSON values."""
    return {
        name: None if entries is None else encode(entries[start:])
        for name, entries in by_position.items()
    }


def _rows(output: Output) -> list[tuple[int, float, dict[int, float]]]:
    """Return each token, its log-prob, and those of the likeliest, the token itself first."""
    rows = zip(output.token_ids, output.logprobs, output.tops, strict=True)
    return [(token, logprob, {token: logprob, **top}) for token, logprob, top in rows]


# ---------------------------------------------------------------- OpenAI's


class CompletionBodies(ResponseBodies[CompletionRequest]):
    """Writer of the answers, whole and streamed, of ``/v1/completions``."""

    def __init__(self, begun: BegunRequest, request: CompletionRequest) -> None:
        super().__init__(begun, request)
        self._next_offsets: dict[int, int] = {}
        """Characters of the tokens reported so far, by choice."""

    @override
    def _body(self, outputs: Sequence[Output], usage: dict[str, Any]) -> dict[str, Any]:
        return {
            **self._chunk_head,
            "choices": [self._whole_choice(output) for output in outputs],
            "service_tier": None,
            "system_fingerprint": None,
            "usage": usage,
            **WITHOUT_TRANSFERS,
        }

    @override
    def _chunk(self, output: Output) -> dict[str, Any]:
        """Return the chunk with a part's text; the prompt's ids come with the first one."""
        choice = self._choice(output)
        if not output.is_first:
            choice["prompt_token_ids"] = None
        return {**self._chunk_head, "choices": [choice]}

    @property
    @override
    def _chunk_head(self) -> dict[str, Any]:
        return self._head("text_completion")

    def _whole_choice(self, output: Output) -> dict[str, Any]:
        return {
            **self._choice(output),
            "prompt_logprobs": self._begun.prompt_logprobs[output.index],
            **as_json(output.by_position),
        }

    def _choice(self, output: Output) -> dict[str, Any]:
        prompt = self._begun.prompts[output.index]
        wants_ids = self._request.return_token_ids
        text = "" if self._request.is_prompt_only else output.text
        choice = {
            "index": output.index,
            "text": self._echo(output, prompt) + text,
            "logprobs": self._logprobs(output),
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
            "token_ids": output.token_ids if wants_ids else None,
            "prompt_token_ids": prompt.token_ids if wants_ids else None,
        }
        if self._request.return_weight_versions:
            choice["weight_versions"] = output.spans if output.finish_reason else None
        return choice

    def _echo(self, output: Output, prompt: Prompt) -> str:
        if not self._echoes(output) or self._request.return_token_ids:
            return ""
        if prompt.text is not None:
            return prompt.text
        return self._begun.tokenizer.decode(prompt.token_ids, skips_special_tokens=False)

    def _echoes(self, output: Output) -> bool:
        """Whether the prompt precedes this part of the output."""
        return bool(self._request.echo) and output.is_first

    def _logprobs(self, output: Output) -> dict[str, Any] | None:
        if self._request.logprobs is None:
            return None
        rows: list[LogprobRow] = self._prompt_rows(output) if self._echoes(output) else []
        if not self._request.is_prompt_only:
            rows += _rows(output)
        index = output.index
        start = self._next_offsets.get(index, 0)
        shows_ids = self._request.return_tokens_as_token_ids
        found = completion_logprobs(
            self._texts(index),
            rows,
            start=start,
            shows_ids=shows_ids,
            is_end=output.finish_reason is not None,
        )
        self._next_offsets[index] = start + sum(map(len, found["tokens"]))
        return found

    def _prompt_rows(self, output: Output) -> "list[LogprobRow]":
        """Return the prompt's tokens as :func:`_rows` does; the first has no log-probs."""
        ids = self._begun.prompts[output.index].token_ids
        entries = self._begun.prompt_logprobs[output.index] or [None] * len(ids)
        most = 1 + (self._request.num_top_logprobs or 0)  # the token itself, and the likeliest
        rows: list[LogprobRow] = []
        for token, entry in zip(ids, entries, strict=True):
            if entry is None:
                rows.append((token, None, None))
                continue
            tops = {int(i): of["logprob"] for i, of in itertools.islice(entry.items(), most)}
            rows.append((token, tops[token], tops))
        return rows


def _ended_by_calls(output: Output, message: Mapping[str, Any]) -> dict[str, Any]:
    has_called = output.finish_reason == "stop" and message.get("tool_calls")
    return {"finish_reason": "tool_calls"} if has_called else {}


class ChatBodies(ResponseBodies[ChatRequest]):
    """Writer of the answers, whole and streamed, of ``/v1/chat/completions``."""

    def __init__(
        self, begun: BegunRequest, request: ChatRequest, turns: Sequence[ServedTurn] = ()
    ) -> None:
        """``turns``: the choices' turns, if their replies are parsed; else all is content."""
        super().__init__(begun, request)
        self._turns = turns

    @override
    def _body(self, outputs: Sequence[Output], usage: dict[str, Any]) -> dict[str, Any]:
        begun = self._begun
        # For a batch of conversations vLLM reports neither.
        is_one = len(begun.prompts) == begun.choices_per_prompt
        wants_ids = is_one and self._request.return_token_ids
        return {
            **self._head("chat.completion"),
            "choices": [self._whole_choice(output) for output in outputs],
            "service_tier": None,
            "system_fingerprint": None,
            "usage": usage,
            "prompt_logprobs": begun.prompt_logprobs[0] if is_one else None,
            "prompt_token_ids": begun.prompts[0].token_ids if wants_ids else None,
            "prompt_text": self._prompt_text if is_one else None,
            **WITHOUT_TRANSFERS,
        }

    @property
    def _prompt_text(self) -> str | None:
        return self._begun.prompts[0].text if self._request.return_prompt_text else None

    @property
    @override
    def opening(self) -> list[dict[str, Any]]:
        """Return chunks with the role of each choice's message."""
        delta = {"role": "assistant", "content": ""}
        ids = self._begun.prompts[0].token_ids if self._request.return_token_ids else None
        return [
            {
                **self._chunk_head,
                "choices": [self._about_choice(index) | {"delta": delta, "token_ids": None}],
                "prompt_token_ids": ids,
                "prompt_text": self._prompt_text,
            }
            for index in range(len(self._begun.prompts))
        ]

    @override
    def _chunk(self, output: Output) -> dict[str, Any]:
        """Return the chunk with a part's text, and with the calls after the last text."""
        delta = self._delta(output)
        choice = {"delta": delta, **self._choice(output), **_ended_by_calls(output, delta)}
        return {**self._chunk_head, "choices": [choice]}

    @property
    @override
    def _chunk_head(self) -> dict[str, Any]:
        return self._head("chat.completion.chunk")

    @staticmethod
    def _about_choice(index: int) -> dict[str, Any]:
        return {"index": index, "logprobs": None, "finish_reason": None, "stop_reason": None}

    def _whole_choice(self, output: Output) -> dict[str, Any]:
        message: dict[str, Any] = {
            "role": "assistant",
            "content": output.text,
            "refusal": None,
            "annotations": None,
            "audio": None,
            "function_call": None,
            "reasoning": None,
            "tool_calls": [],
        }
        message |= self._parsed(output)
        if message["tool_calls"] and not message["content"]:
            message["content"] = None
        choice = self._choice(output) | _ended_by_calls(output, message)
        return {"message": message, **choice, **as_json(output.by_position)}

    def _parsed(self, output: Output) -> dict[str, Any]:
        """Return the fields of the message that the reply of an ended choice sets; empty if replies
        are not parsed."""
        message = self._turns[output.index].message() if self._turns else {}
        reasoning = message.pop("reasoning_content", None)
        return message if reasoning is None else {**message, "reasoning": reasoning}

    def _delta(self, output: Output) -> dict[str, Any]:
        if not self._turns:
            return {"content": output.text}
        turn, is_last = self._turns[output.index], output.finish_reason is not None
        message = self._parsed(output) if is_last else {}
        stops = self._request.stop_strings
        text = message.get("content", "") if is_last else turn.settled_text(stops)
        delta: dict[str, Any] = {"content": turn.sent.unsent(text)}

        def reasoning() -> str:
            return str(message.get("reasoning", "")) if is_last else turn.reasoning_so_far()

        if (delta["content"] or is_last) and (thought := turn.unsent_reasoning(reasoning)):
            delta["reasoning"] = thought
        if calls := message.get("tool_calls"):
            delta["tool_calls"] = [{"index": n, **call} for n, call in enumerate(calls)]
        return delta

    def _choice(self, output: Output) -> dict[str, Any]:
        choice = self._about_choice(output.index) | {
            "logprobs": self._logprobs(output),
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
            "token_ids": output.token_ids if self._request.return_token_ids else None,
        }
        if self._request.return_weight_versions:
            choice["weight_versions"] = output.spans if output.finish_reason else None
        return choice

    def _logprobs(self, output: Output) -> dict[str, Any] | None:
        if not self._request.logprobs:
            return None
        texts = self._texts(output.index)
        shows_ids = self._request.return_tokens_as_token_ids
        most = self._request.top_logprobs or 0
        rows = [
            (token, p, dict(itertools.islice(top.items(), most))) for token, p, top in _rows(output)
        ]
        is_end = output.finish_reason is not None
        return {"content": chat_content(texts, rows, shows_ids=shows_ids, is_end=is_end)}
