"""Request bodies of vLLM's API, and their conversion to options of ``generate``.

Decoded by the handlers of :mod:`app`. Adds to the models of :mod:`openai_requests` the bodies that
only vLLM's server has: token requests, batches of chats, and the bodies of paths that pause engines
or change weights. Fields in a body's ``REFUSED`` (mostly ``openai_requests.UNSERVED``) would change
the output and are not honoured: they are refused with 400, except for the harmless values listed
there. Unknown fields are ignored, as in vLLM. Built on msgspec.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import msgspec

from tidegate.serving import openai_requests
from tidegate.serving.api_errors import ApiError
from tidegate.serving.openai_requests import UNSERVED, Sampling

CHOICES_MAX = 1024
"""Choices of one request: ``n`` times its prompts."""


class TokenSampling(Sampling, kw_only=True):
    """``sampling_params`` of ``/inference/v1/generate``."""

    logprobs: int | None = None
    prompt_logprob_start: Any = None
    truncate_prompt_tokens: Any = None
    routed_experts_prompt_start: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Number of prompt tokens whose routed experts the client has already."""

    REFUSED: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **UNSERVED,
        "prompt_logprob_start": (0,),
        "truncate_prompt_tokens": (),
    }

    @property
    def num_top_logprobs(self) -> int | None:
        """Number of likeliest tokens reported beside each token; 0: the sampled token alone."""
        return self.logprobs


class GenerateRequest(msgspec.Struct, kw_only=True):
    """Body of ``POST /inference/v1/generate``: tokens in, tokens out."""

    features: Any = None
    content_parts: Any = None
    priority: Any = None
    kv_transfer_params: Any = None
    ec_transfer_params: Any = None
    token_ids: list[int]
    sampling_params: TokenSampling
    model: str | None = None
    request_id: str | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    return_token_ids: bool | None = None
    output_mode: str = "tokens"
    cache_salt: str | None = None

    REFUSED: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "features": ({}, []),  # images and the like
        "content_parts": ([],),
        "priority": (0,),
        "kv_transfer_params": ({},),
        "ec_transfer_params": ({},),
    }
    IGNORED: ClassVar[frozenset[str]] = frozenset()


class VllmChatRequest(openai_requests.ChatRequest, kw_only=True):
    """Body of ``POST /v1/chat/completions``."""

    required_prefix_token_ids: list[int] | None = None
    """Tokens of the conversation up to its last assistant message, as NeMo-Gym keeps them."""

    @property
    def token_sampling(self) -> dict[str, Any]:
        """Sampling parameters that were given, by the names of ``/inference/v1/generate``."""
        names = [name for name in Sampling.__struct_fields__ if name not in UNSERVED]
        named = {name: getattr(self, name) for name in names}
        named |= {"max_tokens": self.tokens_max, "logprobs": self.num_top_logprobs}
        if self.schema is not None:
            named["structured_outputs"] = {"json": self.schema}
        return {name: value for name, value in named.items() if value is not None}


class BatchChatRequest(VllmChatRequest, kw_only=True):
    """Body of ``POST /v1/chat/completions/batch``: several conversations, a choice for each."""

    messages: list[list[dict[str, Any]]]  # type: ignore[assignment]

    def refuse_unserved_in_batches(self) -> None:
        """Check that there are conversations, one choice for each, and no stream, tools or prefix.

        Raises:
            ApiError: the batch has something that vLLM refuses in batches, too.
        """
        if not self.messages or not all(self.messages):
            raise ApiError(400, "messages must be conversations, none empty", param="messages")
        many = self.choices_per_prompt != 1
        unserved: dict[str, Any] = {"stream": self.stream, "tools": self.tools, "n": many}
        unserved["required_prefix_token_ids"] = self.required_prefix_token_ids
        for name, is_requested in unserved.items():
            if is_requested:
                raise ApiError(400, f"Batch chat completions do not support {name}.", param=name)


class VllmTokenizeRequest(openai_requests.TokenizeRequest, kw_only=True):
    """Body of ``POST /tokenize``: a text, or a conversation to be rendered as a prompt."""

    model: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    required_prefix_token_ids: list[int] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """Body of ``POST /detokenize``."""

    tokens: list[int]
    model: str | None = None


class AbortRequest(msgspec.Struct, kw_only=True):
    """Body of ``POST /abort_requests``; without ids, of all."""

    request_ids: list[str] | None = None


class LoadAdapterRequest(msgspec.Struct, kw_only=True):
    """Body of ``POST /v1/load_lora_adapter``; the server reads the directory."""

    lora_name: str
    lora_path: str
    load_inplace: bool = False


class UnloadAdapterRequest(msgspec.Struct, kw_only=True):
    """Body of ``POST /v1/unload_lora_adapter``."""

    lora_name: str


class UpdateRequest(msgspec.Struct, kw_only=True):
    """Body of ``POST /update_weights``: one piece for all, or a list with a piece per rank.

    prime-rl's orchestrator sends ``weight_dir`` alone: a directory of all weights.
    """

    update_info: dict[str, Any] | list[dict[str, Any]] | None = None
    weight_dir: str | None = None


class InitRequest(msgspec.Struct, kw_only=True):
    """Body of ``POST /init_weight_transfer_engine``."""

    init_info: dict[str, Any]


class FinishRequest(msgspec.Struct, kw_only=True):
    """Body of ``POST /finish_weight_update``; its body may be empty."""

    weight_version: str | None = None


class ResetRequest(msgspec.Struct, kw_only=True):
    """Body of ``POST /reset_prefix_cache``, as SkyRL sends it; vLLM has the field in the query."""

    reset_running_requests: bool = False


class VersionRequest(msgspec.Struct, kw_only=True):
    """Body of ``POST /update_weight_version``: a name for what is served already."""

    new_version: str
    abort_all_requests: bool = False
    """Field of SGLang's API, where it defaults to true; vLLM has no such field."""


class CheckRequest(msgspec.Struct, kw_only=True):
    """Body of ``POST /weight_checker``."""

    action: str
    baseline: dict[str, str] | None = None


class RpcRequest(msgspec.Struct, kw_only=True):
    """Body of ``POST /collective_rpc``."""

    method: str
    args: list[Any] = []
    kwargs: dict[str, Any] = {}


def required_prefix(request: VllmChatRequest | VllmTokenizeRequest) -> list[int]:
    """Return the tokens with which a conversation's prompt must begin; empty for none.

    NeMo-Gym sends them as ``required_prefix_token_ids``, or as the ``prompt_token_ids`` and
    ``generation_token_ids`` of the last message that has them.

    Raises:
        ApiError: a message's fields are not lists of token ids.
    """
    if request.required_prefix_token_ids is not None:
        return request.required_prefix_token_ids
    for message in reversed(request.messages or ()):
        if "prompt_token_ids" in message:
            given = [message["prompt_token_ids"], message.get("generation_token_ids")]
            try:
                prompt, generation = msgspec.convert(given, list[list[int]])
            except msgspec.ValidationError as error:
                why = f"a message's prompt_token_ids and generation_token_ids are refused: {error}"
                raise ApiError(400, why, param="messages") from None
            return [*prompt, *generation]
    return []


def generate_options(sampling: Sampling, model_stops: tuple[int, ...]) -> dict[str, Any]:
    """Return sampling parameters as options of :meth:`Episode.generate`.

    Seed and number of tokens are not included. ``model_stops`` are the model's own stop tokens.

    Raises:
        ApiError: a field can't be honoured.
    """
    _refuse_out_of_range(sampling)
    options = {"temperature": 1.0, **sampling.shared_options()}
    own = () if sampling.ignore_eos else model_stops
    options["stop_token_ids"] = [*own, *(sampling.stop_token_ids or ())]
    return options


def _refuse_out_of_range(sampling: Sampling) -> None:
    n, temperature, max_tokens = (
        sampling.choices_per_prompt,
        sampling.temperature,
        sampling.tokens_max,
    )
    if n < 1:
        raise ApiError(400, f"n must be at least 1, got {n}.", param="n")
    if temperature is not None and temperature < 0:
        why = f"temperature must be non-negative, got {temperature}."
        raise ApiError(400, why, param="temperature")
    if n > 1 and temperature == 0:
        raise ApiError(400, f"n must be 1 when using greedy sampling, got {n}.")
    if max_tokens is not None and max_tokens < 1:
        why = f"max_tokens must be at least 1, got {max_tokens}."
        raise ApiError(400, why, param="max_tokens")


@dataclass(frozen=True, slots=True)
class Prompt:
    """Prompt of one or more choices."""

    token_ids: list[int]
    text: str | None = None
    """The client's text, or the rendered conversation; None if it gave token ids."""
