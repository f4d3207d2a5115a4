"""SGLang's ``/generate``: begins a request's outputs, and writes their answer."""

import contextlib
import itertools
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from typing_extensions import override

from tidegate.errors import ContextFull
from tidegate.serving.control.routes import ServerParts
from tidegate.serving.http.errors import ApiError, VllmErrors
from tidegate.serving.openai.completions import CheckedRequest, refuse_many
from tidegate.serving.openai.model_info import VersionLabels, limits_of
from tidegate.serving.openai.outputs import Output, TopLogprobs
from tidegate.serving.openai.requests import Prompt, checked_cache_salt
from tidegate.serving.openai.response_bodies import BegunRequest, OutputsAnswer
from tidegate.serving.sglang.requests import PromptRequest, SglangGenerateRequest

ABORTED = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
"""``finish_reason`` of an output that was aborted."""

Entry = tuple[float | None, int, str | None]
"""Log-prob, token id and text of a token; the text is None unless the request asks for it."""


@dataclass(slots=True, eq=False)
class OutputSoFar:
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
        return self.begun.prompts[0]

    def add(self, output: Output) -> None:
        """Add the next part of the output."""
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs
        self.tops += output.tops
        self.text += output.text
        if output.finish_reason is not None:
            self.last = output

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
        prompt_logprobs = self.begun.prompt_logprobs[0]
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
        tokenizer = self.begun.tokenizer
        return logprob, token, tokenizer.token(token) if self.body.return_text_in_logprobs else None


class SglangAnswer(OutputsAnswer):
    """The answer to ``/generate``: each event of a stream has all tokens of an output up to now."""

    def __init__(
        self, body: SglangGenerateRequest, outputs: Sequence[OutputSoFar], labels: VersionLabels
    ) -> None:
        super().__init__(*(output.begun for output in outputs))
        self._body, self._outputs, self._labels = body, outputs, labels

    @property
    @override
    def is_stream(self) -> bool:
        return self._body.stream

    @override
    def whole(self, outputs: Sequence[Output]) -> bytes:
        # One by one, because the encoder holds the interpreter until it is done.
        contents = [msgspec.Raw(msgspec.json.encode(self._content(each))) for each in outputs]
        return msgspec.json.encode(contents if self._body.is_list else contents[0])

    @override
    def chunk(self, output: Output) -> dict[str, Any]:
        content = self._content(output)
        return content | {"index": output.index} if self._body.is_list else content

    @override
    def error(self, error: Exception) -> dict[str, Any]:
        failure = VllmErrors().answer_to(error)
        kind = "invalid_request_error" if failure.status < 500 else "internal_error"
        about = {"message": str(failure), "type": kind, "code": failure.status, "retryable": False}
        return {"error": about}

    def _content(self, output: Output) -> dict[str, Any]:
        so_far = self._outputs[output.index]
        so_far.add(output)
        return so_far.content(self._labels.newest)


# ---------------------------------------------------------------- beginning


async def begin(parts: ServerParts, body: SglangGenerateRequest) -> SglangAnswer:
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
        outputs = await _begin_prompts(parts, body, prompts)
    return SglangAnswer(body, outputs, parts.weights.labels)


async def _begin_prompts(
    parts: ServerParts, body: SglangGenerateRequest, prompts: Sequence[PromptRequest]
) -> list[OutputSoFar]:
    outputs: list[OutputSoFar] = []
    refuse_many(sum(prompt.sampling.copies for prompt in prompts))
    checked = [(prompt, each) for prompt in prompts for each in await _checked(parts, prompt)]
    parts.completer.refuse_large([each for _, each in checked])
    try:
        for index, (prompt, each) in enumerate(checked):
            begun = await parts.completer.begin(each, index)
            outputs.append(OutputSoFar(prompt, body, begun))
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
