"""What does a client of vLLM's API get? Bodies of its three kinds of completion, and their chunks.

Pure: takes outputs, gives dicts. It knows no engines and no sockets.
"""

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from tidegate.serving.vllm_server.outputs import Output
from tidegate.serving.vllm_server.protocol import (
    ChatRequest,
    CompletionRequest,
    GenerateRequest,
    Prompt,
)
from tidegate.serving.vllm_server.words import Words

PromptLogprobs = list[dict[str, Any] | None]


@dataclass(frozen=True, slots=True)
class About:
    """What is the same in all parts of an answer."""

    request_id: str
    model: str
    created_s: int
    words: Words
    prompts: Sequence[Prompt]
    """One for each choice."""
    prompt_logprobs: Sequence[PromptLogprobs | None]
    """Likewise."""
    choices_per_prompt: int = 1

    def usage(self, output_tokens: int) -> dict[str, Any]:
        """A prompt is counted once, whatever its choices."""
        prompt = sum(len(p.token_ids) for p in self.prompts[:: self.choices_per_prompt])
        return {
            "prompt_tokens": prompt,
            "total_tokens": prompt + output_tokens,
            "completion_tokens": output_tokens,
        }


WITHOUT_DETAILS = {"prompt_tokens_details": None, "completion_tokens_details": None}
WITHOUT_TRANSFERS = {"kv_transfer_params": None, "ec_transfer_params": None, "metrics": None}


class Bodies:
    """Of one request."""

    def __init__(self, about: About) -> None:
        self.about = about

    def whole(self, outputs: Sequence[Output]) -> dict[str, Any]:
        """The answer to a request that is not streamed."""
        raise NotImplementedError

    def chunk(self, output: Output) -> dict[str, Any]:
        """A part of one choice."""
        raise NotImplementedError

    def usage_chunk(self, output_tokens: int) -> dict[str, Any]:
        """What all of a stream cost."""
        raise NotImplementedError

    @property
    def opening(self) -> list[dict[str, Any]]:
        """What a stream begins with, before any token."""
        return []


# ---------------------------------------------------------------- tokens in, tokens out


class GenerateBodies(Bodies):
    """``/inference/v1/generate``."""

    def __init__(self, about: About, request: GenerateRequest) -> None:
        super().__init__(about)
        self._request = request

    def whole(self, outputs: Sequence[Output]) -> dict[str, Any]:
        """All choices."""
        about, wants_prompt = self.about, self._request.return_token_ids
        tokens = sum(len(output.token_ids) for output in outputs)
        return {
            "request_id": about.request_id,
            "model": about.model,
            "created": about.created_s,
            "usage": about.usage(tokens) | WITHOUT_DETAILS,
            "prompt_logprobs": about.prompt_logprobs[0],
            "prompt_token_id_logprobs": None,
            "prompt_token_ids": about.prompts[0].token_ids if wants_prompt else None,
            "mm_placeholders": None,
            **WITHOUT_TRANSFERS,
            "output_mode": self._request.output_mode,
            "choices": [self._choice(output) for output in outputs],
        }

    def chunk(self, output: Output) -> dict[str, Any]:
        """The tokens that are new."""
        choice = self._choice(output)
        if output.finish_reason is None:
            choice["weight_versions"] = None
        return {**self._head, "usage": None, "choices": [choice]}

    def usage_chunk(self, output_tokens: int) -> dict[str, Any]:
        """Last but ``[DONE]``."""
        return {**self._head, "usage": self.about.usage(output_tokens), "choices": []}

    @property
    def _head(self) -> dict[str, Any]:
        mode = self._request.output_mode
        return {"request_id": self.about.request_id, "output_mode": mode}

    def _choice(self, output: Output) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": output.index,
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
            "token_ids": output.token_ids,
            "routed_experts": None,
            "sampling_mask": None,
            "weight_versions": output.spans,
        }
        if self._request.output_mode == "text":
            choice["text"] = output.text
        choice["logprobs"] = self._logprobs(output)
        return choice

    def _logprobs(self, output: Output) -> dict[str, Any] | None:
        if self._request.sampling_params.logprobs is None:
            return None
        if self._request.output_mode == "text":
            words = self.about.words
            return {"content": [_as_text(words, *one) for one in _rows(output)]}
        rows = zip(_rows(output), output.tops, strict=True)
        return {"content": [_as_ids(*row, likeliest) for row, likeliest in rows]}


def _rows(output: Output) -> list[tuple[int, float, dict[int, float]]]:
    """Each token, its log-prob, and those of the likeliest, the token itself first."""
    rows = zip(output.token_ids, output.logprobs, output.tops, strict=True)
    return [(token, logprob, {token: logprob, **top}) for token, logprob, top in rows]


def _as_ids(
    token: int, logprob: float, top: dict[int, float], likeliest: Collection[int]
) -> dict[str, Any]:
    ranks = {token: rank for rank, token in enumerate(likeliest, 1)}

    def told(token: int, logprob: float) -> dict[str, Any]:
        return {"token_id": token, "logprob": logprob, "rank": ranks.get(token)}

    return {**told(token, logprob), "top_logprobs": [told(*pair) for pair in top.items()]}


def _as_text(words: Words, token: int, logprob: float, top: dict[int, float]) -> dict[str, Any]:
    def told(token: int, logprob: float) -> dict[str, Any]:
        text = words.token(token)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

    return {**told(token, logprob), "top_logprobs": [told(*pair) for pair in top.items()]}


# ---------------------------------------------------------------- OpenAI's


class CompletionBodies(Bodies):
    """``/v1/completions``."""

    def __init__(self, about: About, request: CompletionRequest) -> None:
        super().__init__(about)
        self._request = request

    def whole(self, outputs: Sequence[Output]) -> dict[str, Any]:
        """All choices of all prompts."""
        tokens = sum(len(output.token_ids) for output in outputs)
        return {
            **self._head,
            "choices": [self._whole_choice(output) for output in outputs],
            "service_tier": None,
            "system_fingerprint": None,
            "usage": self.about.usage(tokens) | WITHOUT_DETAILS,
            **WITHOUT_TRANSFERS,
        }

    def chunk(self, output: Output) -> dict[str, Any]:
        """A part of one choice; the prompt's ids come with the first."""
        choice = self._choice(output)
        if not output.is_first:
            choice["prompt_token_ids"] = None
        return {**self._head, "choices": [choice]}

    def usage_chunk(self, output_tokens: int) -> dict[str, Any]:
        """Last but ``[DONE]``."""
        return {**self._head, "choices": [], "usage": self.about.usage(output_tokens)}

    @property
    def _head(self) -> dict[str, Any]:
        about = self.about
        return {
            "id": about.request_id,
            "object": "text_completion",
            "created": about.created_s,
            "model": about.model,
        }

    def _whole_choice(self, output: Output) -> dict[str, Any]:
        about = self.about
        told = about.prompt_logprobs[output.index]
        return {**self._choice(output), "prompt_logprobs": told, "routed_experts": None}

    def _choice(self, output: Output) -> dict[str, Any]:
        prompt = self.about.prompts[output.index]
        wants_ids = self._request.return_token_ids
        choice = {
            "index": output.index,
            "text": self._echo(output, prompt) + output.text,
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
        if not self._request.echo or not output.is_first:
            return ""
        if prompt.text is not None:
            return prompt.text
        return self.about.words.decode(prompt.token_ids, skips_special_tokens=False)

    def _logprobs(self, output: Output) -> dict[str, Any] | None:
        if self._request.logprobs is None:
            return None
        rows = _rows(output)
        texts = [self._text(token) for token, _, _ in rows]
        offsets = list(itertools.accumulate(map(len, texts), initial=0))[:-1]
        tops = [{self._text(token): p for token, p in top.items()} for _, _, top in rows]
        return {
            "text_offset": offsets,
            "token_logprobs": [logprob for _, logprob, _ in rows],
            "tokens": texts,
            "top_logprobs": tops,
        }

    def _text(self, token: int) -> str:
        if self._request.return_tokens_as_token_ids:
            return f"token_id:{token}"
        return self.about.words.token(token)


class ChatBodies(Bodies):
    """``/v1/chat/completions``."""

    def __init__(self, about: About, request: ChatRequest) -> None:
        super().__init__(about)
        self._request = request

    def whole(self, outputs: Sequence[Output]) -> dict[str, Any]:
        """All choices."""
        about = self.about
        # Of several conversations, a batch's, vLLM tells neither.
        is_one = len(about.prompts) == about.choices_per_prompt
        wants_ids = is_one and self._request.return_token_ids
        tokens = sum(len(output.token_ids) for output in outputs)
        return {
            **self._head("chat.completion"),
            "choices": [self._whole_choice(output) for output in outputs],
            "service_tier": None,
            "system_fingerprint": None,
            "usage": about.usage(tokens) | WITHOUT_DETAILS,
            "prompt_logprobs": about.prompt_logprobs[0] if is_one else None,
            "prompt_token_ids": about.prompts[0].token_ids if wants_ids else None,
            "prompt_text": None,
            **WITHOUT_TRANSFERS,
        }

    @property
    def opening(self) -> list[dict[str, Any]]:
        """Who speaks, for each choice."""
        delta = {"role": "assistant", "content": ""}
        ids = self.about.prompts[0].token_ids if self._request.return_token_ids else None
        return [
            {
                **self._head("chat.completion.chunk"),
                "choices": [self._about_choice(index) | {"delta": delta, "token_ids": None}],
                "prompt_token_ids": ids,
            }
            for index in range(len(self.about.prompts))
        ]

    def chunk(self, output: Output) -> dict[str, Any]:
        """A part of one choice."""
        choice = {"delta": {"content": output.text}, **self._choice(output)}
        return {**self._head("chat.completion.chunk"), "choices": [choice]}

    def usage_chunk(self, output_tokens: int) -> dict[str, Any]:
        """Last but ``[DONE]``."""
        head = self._head("chat.completion.chunk")
        return {**head, "choices": [], "usage": self.about.usage(output_tokens)}

    def _head(self, kind: str) -> dict[str, Any]:
        about = self.about
        return {
            "id": about.request_id,
            "object": kind,
            "created": about.created_s,
            "model": about.model,
        }

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
        return {"message": message, **self._choice(output), "routed_experts": None}

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
        return {"content": [self._logprob(*row) for row in _rows(output)]}

    def _logprob(self, token: int, logprob: float, top: dict[int, float]) -> dict[str, Any]:
        told = _as_text(self.about.words, token, logprob, top)
        told["top_logprobs"] = told["top_logprobs"][: self._request.top_logprobs or 0]
        if self._request.return_tokens_as_token_ids:
            told["token"] = f"token_id:{token}"
        return told
