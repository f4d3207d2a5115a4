"""SGLang's ``/generate``: begins a request's outputs, and answers them whole or as a stream.

:class:`Completer` turns prompts into choices; this module adds SGLang's checks and writes SGLang's
bodies.
"""

import contextlib
import itertools
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from tidegate.errors import ContextFull
from tidegate.serving.control.routes import ServerParts
from tidegate.serving.http.errors import ApiError, VllmErrors
from tidegate.serving.http.scaffold import DONE_EVENT, encoded_response, stream_event
from tidegate.serving.http.server import OwnedStream, unless_gone
from tidegate.serving.openai.completions import (
    BegunRequest,
    CheckedRequest,
    count_outputs,
    refuse_many,
    running_outputs,
)
from tidegate.serving.openai.model_info import limits_of
from tidegate.serving.openai.outputs import Output, OutputReader, TopLogprobs
from tidegate.serving.openai.requests import Prompt, checked_cache_salt
from tidegate.serving.sglang.requests import PromptRequest, SglangGenerateRequest

ABORTED = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
"""``finish_reason`` of an output that was aborted."""

Entry = tuple[float | None, int, str | None]
"""Log-prob, token id and text of a token; the text is None unless the request asks for it."""


@dataclass(slots=True, eq=False)
class BegunOutput:
    """One output of a ``/generate`` request, with the tokens and text read so far."""

    request: PromptRequest
    body: SglangGenerateRequest
    begun: BegunRequest
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    tops: list[TopLogprobs] = field(default_factory=list)
    text: str = ""
    last: Output | None = None
    """Last part of the output; None while it runs."""
    _prompt_fields: dict[str, msgspec.Raw] | None = None
    """Encoded log-probs of the prompt, made once because every event of a stream has them."""

    @property
    def prompt(self) -> Prompt:
        """The prompt."""
        return self.begun.facts.prompts[0]

    @property
    def reader(self) -> OutputReader | None:
        """Reader of the output; None if the request asks for log-probs of its prompt alone."""
        return next(iter(self.begun.readers), None)

    def add(self, output: Output) -> None:
        """Add the next part of the output."""
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs
        self.tops += output.tops
        self.text += output.text
        if output.finish_reason is not None:
            self.last = output

    def finish(self) -> None:
        """Add the unread rest of an output that has ended."""
        reader = self.reader
        reason = "abort" if self.begun.request.aborted_before_start else "length"
        self.add(Output(0, [], [], [], "", reason) if reader is None else reader.rest())

    # ------------------------------------------------------------ bodies

    def content(self, newest_label: str) -> dict[str, Any]:
        """Return the output up to now in SGLang's form.

        ``newest_label`` is the version of the live weights, for outputs without a token.
        """
        spans = self.last.spans if self.last is not None else ()
        spans = spans or [{"version": newest_label, "start": 0, "end": 0}]
        meta = {
            "id": self.begun.request.request_id,
            "finish_reason": self._finish_reason(),
            "prompt_tokens": len(self.prompt.token_ids),
            "weight_version": spans[-1]["version"],
            "num_retractions": 0,
            **(self._logprob_fields() if self.request.return_logprob else {}),
            "reasoning_tokens": 0,
            "completion_tokens": len(self.token_ids),
            "cached_tokens": 0,
            "cached_tokens_details": None,
            "dp_rank": None,
            "response_sent_to_client_ts": time.time(),
        }
        if self.last is not None:
            meta["weight_versions"] = spans
            meta["e2e_latency"] = time.monotonic() - self.begun.request.began_s
        content = {"text": self.text, "output_ids": self.token_ids, "meta_info": meta}
        if self.body.return_prompt_token_ids:
            content["prompt_token_ids"] = self.prompt.token_ids
        return content

    def _finish_reason(self) -> dict[str, Any] | None:
        if self.last is None:
            return None
        match self.last.finish_reason:
            case "stop":
                reason = self.last.stop_reason  # None for the model's own stop token
                return {"type": "stop", "matched": self.token_ids[-1] if reason is None else reason}
            case "length":
                return {"type": "length", "length": len(self.token_ids)}
        return ABORTED

    def _logprob_fields(self) -> dict[str, Any]:
        output = zip(self.logprobs, self.token_ids, strict=True)
        if self._prompt_fields is None:
            names = ("input_token_logprobs", "input_top_logprobs")
            columns = zip(names, self._prompt_logprobs(), strict=True)
            self._prompt_fields = {n: msgspec.Raw(msgspec.json.encode(each)) for n, each in columns}
        fields: dict[str, Any] = {
            "input_token_logprobs": self._prompt_fields["input_token_logprobs"],
            "output_token_logprobs": [self._entry(*each) for each in output],
            "output_token_logprobs_length": len(self.token_ids),
        }
        if self.request.top_logprobs_num:
            fields["input_top_logprobs"] = self._prompt_fields["input_top_logprobs"]
            fields["output_top_logprobs"] = [
                [self._entry(logprob, token) for token, logprob in top.items()] for top in self.tops
            ]
        return fields

    def _prompt_logprobs(self) -> tuple[list[Entry], list[list[Entry] | None]]:
        """Return entries of the prompt's tokens; SGLang reports no log-prob for the first token."""
        prompt_logprobs = self.begun.facts.prompt_logprobs[0]
        if prompt_logprobs is None:
            return [], []
        ids, num_top = self.prompt.token_ids, self.request.top_logprobs_num
        start = min(self.request.logprob_start_len, len(ids))
        entries = [self._entry(None, token) for token in ids[start : start + 1]]
        tops: list[list[Entry] | None] = [None] * len(entries)
        for token, by_id in itertools.islice(
            zip(ids, prompt_logprobs, strict=True), start + 1, None
        ):
            assert by_id is not None, "only the first token of a prompt has no log-prob"
            entries.append(self._entry(by_id[str(token)]["logprob"], token))
            top = sorted(
                (each["rank"], int(top_id), each["logprob"])
                for top_id, each in by_id.items()
                if each["rank"] is not None and each["rank"] <= num_top
            )
            tops.append([self._entry(logprob, top_id) for _, top_id, logprob in top])
        return entries, tops

    def _entry(self, logprob: float | None, token: int) -> Entry:
        tokenizer = self.begun.facts.tokenizer
        return logprob, token, tokenizer.token(token) if self.body.return_text_in_logprobs else None


# ---------------------------------------------------------------- beginning


async def begin(parts: ServerParts, body: SglangGenerateRequest) -> list[BegunOutput]:
    """Begin all outputs of a request; none runs if one is refused.

    Raises:
        ApiError: the request can't be honoured.
    """
    prompts = body.prompts()
    with contextlib.ExitStack() as reserved:
        try:
            own_ids = [prompt.rid for prompt in prompts if prompt.rid]
            reserved.enter_context(parts.requests.reserve(own_ids))
        except ValueError as error:
            raise ApiError(400, f"Duplicate request ID detected: {error}") from None
        return await _begin_prompts(parts, body, prompts)


async def _begin_prompts(
    parts: ServerParts, body: SglangGenerateRequest, prompts: Sequence[PromptRequest]
) -> list[BegunOutput]:
    outputs: list[BegunOutput] = []
    refuse_many(sum(prompt.sampling.copies for prompt in prompts))
    checked = [(prompt, each) for prompt in prompts for each in await _checked(parts, prompt)]
    parts.completer.refuse_large([each for _, each in checked])
    try:
        for prompt, each in checked:
            begun = await parts.completer.begin(each)
            outputs.append(BegunOutput(prompt, body, begun))
    except BaseException:
        for output in outputs:
            output.begun.request.abort()
        raise
    return outputs


async def _checked(parts: ServerParts, prompt: PromptRequest) -> list[CheckedRequest]:
    """Return a request for each output of a prompt, because each may have its own seed."""
    ids = prompt.input_ids
    context, new = limits_of(parts.fleet).context_tokens_max, prompt.sampling.max_new_tokens
    try:
        if ids is None:
            ids = await parts.completer.tokenizer.encode(
                prompt.text or "", adds_special_tokens=True, tokens_max=context
            )
        if not ids:
            raise ApiError(400, "input_ids cannot be empty.")
        if len(ids) >= context:
            raise ContextFull(tokens=len(ids), tokens_max=context)
    except ContextFull as full:
        raise ApiError(
            400,
            f"The input ({full.tokens} tokens) is longer than the model's context length "
            f"({context} tokens).",
        ) from None
    if new is not None and new < 0:
        raise ApiError(400, f"max_new_tokens must be at least 0, got {new}.")
    if new is not None and len(ids) + new > context:
        raise ApiError(
            400,
            f"Requested token count exceeds the model's maximum context length of {context} "
            f"tokens. You requested a total of {len(ids) + new} tokens: {len(ids)} tokens from the "
            f"input messages and {new} tokens for the completion. Please reduce the number of "
            f"tokens in the input messages or the completion to fit within the limit.",
        )
    salt = checked_cache_salt(prompt.extra_key or None)
    return [
        CheckedRequest(
            prompt.rid or secrets.token_hex(16),
            prompt.lora_path,
            [Prompt(ids, prompt.text)],
            prompt.sampling.as_sampling(
                copy,
                top_logprobs=prompt.num_top_logprobs,
                prompt_logprobs=prompt.num_prompt_logprobs,
            ),
            new,
            salt,
        )
        for copy in range(prompt.sampling.copies)
    ]


# ---------------------------------------------------------------- answering


async def answer(parts: ServerParts, http: HttpRequest, body: SglangGenerateRequest) -> Response:
    """Begin a request and answer it, whole or as a stream; a client that disconnects aborts it.

    Raises:
        ApiError: the request can't be honoured.
        ClientDisconnect: the client is gone.
    """
    outputs = await unless_gone(http, begin(parts, body))

    def abort() -> None:
        for output in outputs:
            output.begun.request.abort()

    if body.stream:
        return OwnedStream(_stream(parts, body, outputs), abort)
    try:
        for output in outputs:
            await unless_gone(http, output.begun.request.wait())
    finally:
        abort()

    def encode() -> bytes:
        for output in outputs:
            output.finish()
        newest = parts.weights.labels.newest
        # One by one, because the encoder holds the interpreter until it is done.
        contents = [msgspec.Raw(msgspec.json.encode(each.content(newest))) for each in outputs]
        return msgspec.json.encode(contents if body.is_list else contents[0])

    tokens = sum(output.begun.reported_tokens for output in outputs)
    response = await encoded_response(encode, tokens=tokens)
    _count(parts, outputs)
    return response


async def _stream(
    parts: ServerParts, body: SglangGenerateRequest, outputs: Sequence[BegunOutput]
) -> AsyncIterator[bytes]:
    """Yield events that have all tokens of an output up to now, as SGLang sends them."""
    owners = {output.reader: (index, output) for index, output in enumerate(outputs)}
    readers = [reader for reader in owners if reader is not None]
    try:
        async for reader, part in running_outputs(readers):
            index, output = owners[reader]
            output.add(part)
            content = output.content(parts.weights.labels.newest)
            yield stream_event(content | {"index": index} if body.is_list else content)
        for index, output in enumerate(outputs):
            await output.begun.request.wait()
            if output.reader is None:
                output.finish()
                content = output.content(parts.weights.labels.newest)
                yield stream_event(content | {"index": index} if body.is_list else content)
        _count(parts, outputs)
    except Exception as error:  # noqa: BLE001 - reported to the client, whatever it is
        yield stream_event({"error": _stream_error(error)})
    finally:
        for output in outputs:
            output.begun.request.abort()
    yield DONE_EVENT


def _stream_error(error: Exception) -> dict[str, Any]:
    failure = VllmErrors().answer_to(error)
    kind = "invalid_request_error" if failure.status < 500 else "internal_error"
    return {"message": str(failure), "type": kind, "code": failure.status, "retryable": False}


def _count(parts: ServerParts, outputs: Sequence[BegunOutput]) -> None:
    for output in outputs:
        if output.last is not None:
            count_outputs(parts.counts, output.begun, [output.last])
