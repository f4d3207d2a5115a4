"""Request bodies of the gateway, and their conversion to options of :meth:`Episode.generate`.

Adds the gateway's refused fields and limits to the request structs that all servers share.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import msgspec

from tidegate.errors import InfrastructureFailed, PolicyFailed
from tidegate.orchestrator.episodes.forced_calls import is_free
from tidegate.serving.http.errors import ApiError
from tidegate.serving.openai.requests import (
    TOP_LOGPROBS_MAX,
    ChatRequest,
    CompletionRequest,
    GenerateRequest,
    OpenAIRequest,
    Sampling,
    checked_cache_salt,
    refuse_fields,
)

CHOICES_MAX = 64
"""Largest number of choices of one request: ``n`` times the number of prompts."""

_ALSO_REFUSED: Mapping[str, tuple[Any, ...]] = {
    "ignore_eos": (False,),
    "include_stop_str_in_output": (False,),
    "prompt_logprobs": (),
    "skip_special_tokens": (True,),
    "add_special_tokens": (False,),
    "truncate_prompt_tokens": (),
    "truncation_side": (),
    "echo": (False,),
}


class GatewayChatRequest(ChatRequest, kw_only=True):
    """Body of ``POST /v1/chat/completions``."""

    REFUSED: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **ChatRequest.REFUSED,
        **_ALSO_REFUSED,
        "return_prompt_text": (False,),
    }
    IGNORED: ClassVar[frozenset[str]] = frozenset({"model", "required_prefix_token_ids"})
    """There is one model, and a conversation's row keeps its tokens."""
    required_prefix_token_ids: Any = None


class GatewayCompletionRequest(CompletionRequest, kw_only=True):
    """Body of ``POST /v1/completions``. A prompt of token ids that begins with all tokens of a row
    continues that row."""

    REFUSED: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **CompletionRequest.REFUSED,
        **_ALSO_REFUSED,
    }
    IGNORED: ClassVar[frozenset[str]] = frozenset({"model"})


def completion_of(request: GenerateRequest) -> GatewayCompletionRequest:
    """Convert a request of ``/inference/v1/generate`` to the completion request of the same tokens.

    Fields that only affect the text are omitted.

    Raises:
        ApiError: a field can't be honoured.
    """
    sampling = request.sampling_params
    refuse_fields(request, {**request.REFUSED, "stream": (False,), "output_mode": ("tokens",)})
    refuse_fields(sampling, sampling.REFUSED)
    names = set(Sampling.__struct_fields__) - {"skip_special_tokens", "include_stop_str_in_output"}
    return GatewayCompletionRequest(
        prompt=request.token_ids,
        model=request.model,
        request_id=request.request_id,
        return_token_ids=request.return_token_ids,
        cache_salt=request.cache_salt,
        logprobs=sampling.logprobs,
        **{name: getattr(sampling, name) for name in names},
    )


class FailureRequest(msgspec.Struct, kw_only=True):
    """Body of ``POST /sessions/{id}/failure``."""

    cause: Literal["policy", "infrastructure"]
    reason: str
    message: str = ""

    def error(self) -> PolicyFailed | InfrastructureFailed:
        """Return the failure as the error that ends the episode.

        Raises:
            ConfigError: the reason has a form that the ledger can't count by.
        """
        kind = PolicyFailed if self.cause == "policy" else InfrastructureFailed
        return kind(self.message or f"the agent reported {self.reason}", reason=self.reason)


class RewardRequest(msgspec.Struct, kw_only=True):
    """Body of ``POST /sessions/{id}/reward``."""

    reward: float


def generate_options(request: OpenAIRequest) -> dict[str, Any]:
    """Return a request's sampling parameters as options of :meth:`Episode.generate`.

    Raises:
        ApiError: a field can't be honoured.
    """
    choices = request.choices_per_prompt
    prompts = len(request.prompts) if isinstance(request, CompletionRequest) else 1
    if not 1 <= choices * prompts <= CHOICES_MAX:
        why = f"n must be from 1 to {CHOICES_MAX}, for all prompts together, got"
        raise ApiError(400, f"{why} {choices * prompts}", param="n")
    if request.own_seed is not None and choices > 1:
        raise ApiError(400, "with a seed all n choices would be the same; leave one of them out")
    top = request.num_top_logprobs
    if top is not None and not 0 <= top <= TOP_LOGPROBS_MAX:
        raise ApiError(400, f"log-probs of 0 to {TOP_LOGPROBS_MAX} tokens are reported, got {top}")
    if (request.stream_options or {}).get("continuous_usage_stats"):
        why = "stream_options.continuous_usage_stats is not served: leave it out"
        raise ApiError(400, why, param="stream_options")
    options = request.shared_options()
    has_form = request.schema is not None or request.grammar is not None
    if has_form and isinstance(request, ChatRequest) and not is_free(request.call_choice):
        raise ApiError(400, "a forced call has its own form: omit response_format")
    if request.stop_token_ids is not None:
        options["stop_token_ids"] = request.stop_token_ids
    if request.own_seed is not None:
        options["seed"] = request.own_seed
    if request.tokens_max is not None:
        options["max_tokens"] = request.tokens_max
    if salt := checked_cache_salt(request.cache_salt):
        options["cache_salt"] = salt
    return options
