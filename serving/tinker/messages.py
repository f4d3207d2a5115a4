"""Bodies of the Tinker API's JSON requests, under the SDK's names; unknown fields are refused.

Fields that the server does not serve are here too, so that they are refused by name. ``type``
repeats the path.
"""

from typing import Annotated, Any

import msgspec

from tidegate.transport.sampling import AttachmentOptions

NUMBER_MAX = 999_999_999
"""Largest number of a model or sampler within its session: ids have 9 digits."""

TTL_S_MAX = 10 * 365 * 24 * 3600
"""Longest time for which a checkpoint is kept, if it is not kept for ever: 10 years."""

Number = Annotated[int, msgspec.Meta(ge=0, le=NUMBER_MAX)]
"""Number that a client gives to what it makes. Requests of models have no such bounds, because
a request that is refused before it has its place would leave later requests waiting."""

Seed = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]


class TinkerRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all requests."""

    type: str = ""


class ClientConfigRequest(TinkerRequest, frozen=True, kw_only=True):
    """``client/config`` and ``client/dynamic_config``."""

    sdk_version: str = ""


class CreateSessionRequest(TinkerRequest, frozen=True, kw_only=True):
    """Body of ``create_session``: begins a client's session."""

    tags: list[str] = []
    user_metadata: dict[str, Any] | None = None
    sdk_version: str = ""
    project_id: str | None = None
    display_name: str | None = None


class SessionRequest(TinkerRequest, frozen=True, kw_only=True):
    """Body of ``session_heartbeat``: keeps a session alive."""

    session_id: str


class LoraConfigFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``lora_config`` of ``create_model``."""

    rank: int
    seed: Seed | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerFields(msgspec.Struct, frozen=True, kw_only=True):
    """``optimizer_config``: which optimizer."""

    type: str = "adamw"


class CreateModelRequest(TinkerRequest, frozen=True, kw_only=True):
    """Body of ``create_model``: a base model, and the LoRA adapter to train on it."""

    session_id: str
    model_seq_id: Number
    base_model: str
    user_metadata: dict[str, Any] | None = None
    lora_config: LoraConfigFields | None = None
    optimizer_config: OptimizerFields = OptimizerFields()


class ModelRequest(TinkerRequest, frozen=True, kw_only=True):
    """Body of ``get_info`` and ``unload_model``: one trained model."""

    model_id: str


class AdamFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``adam_params`` of ``optim_step``."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


class OptimStepRequest(TinkerRequest, frozen=True, kw_only=True):
    """Body of ``optim_step``: one step of the optimizer, with its parameters."""

    model_id: str
    seq_id: int
    adam_params: AdamFields | None = None
    optimizer_params: dict[str, Any] | None = None


class SaveWeightsRequest(TinkerRequest, frozen=True, kw_only=True):
    """Body of ``save_weights``: a checkpoint that training can continue from."""

    model_id: str
    seq_id: int
    path: str | None = None
    ttl_seconds: int | None = None
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None


class LoadWeightsRequest(TinkerRequest, frozen=True, kw_only=True):
    """``load_weights``: into a model (``model_id``), or into a new one (``session_id``)."""

    model_id: str | None = None
    seq_id: int | None = None
    session_id: str | None = None
    model_seq_id: Number | None = None
    base_model: str | None = None
    user_metadata: dict[str, Any] | None = None
    path: str
    optimizer: bool
    optimizer_config: OptimizerFields | None = None
    weights_access_token: str | None = None


class WeightsInfoRequest(TinkerRequest, frozen=True, kw_only=True):
    """Body of ``weights_info``: a checkpoint to describe."""

    tinker_path: str


class TtlRequest(TinkerRequest, frozen=True, kw_only=True):
    """``PUT …/ttl`` of a checkpoint."""

    ttl_seconds: Annotated[int, msgspec.Meta(ge=0, le=TTL_S_MAX)] | None = None


class CancelFutureRequest(TinkerRequest, frozen=True, kw_only=True):
    """Body of ``cancel_future``: a request that nobody waits for any more."""

    request_id: str


class SaveSamplerRequest(TinkerRequest, frozen=True, kw_only=True):
    """Body of ``save_weights_for_sampler``: weights to sample with."""

    model_id: str
    seq_id: int
    path: str | None = None
    sampling_session_seq_id: int | None = None
    kind: str = "snapshot"
    ttl_seconds: int | None = None
    user_metadata: dict[str, str] | None = None


class CreateSamplingSessionRequest(TinkerRequest, frozen=True, kw_only=True):
    """Body of ``create_sampling_session``: a model or checkpoint to sample from."""

    session_id: str
    sampling_session_seq_id: Number
    base_model: str | None = None
    model_path: str | None = None


class PromptChunk(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a prompt: tokens, or something that is refused by its type."""

    type: str = "encoded_text"
    tokens: list[int] = []


class PromptFields(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt."""

    chunks: list[PromptChunk]


class SamplingFields(msgspec.Struct, frozen=True, kw_only=True):
    """``sampling_params`` of ``asample``: how tokens are drawn, and where they end."""

    max_tokens: int | None = None
    seed: int | None = None
    stop: str | list[str | int] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0


class SampleRequest(TinkerRequest, frozen=True, kw_only=True):
    """Body of ``asample``: a prompt, and how many answers to draw."""

    prompt: PromptFields
    sampling_params: SamplingFields
    sampling_session_id: str
    seq_id: Number
    num_samples: int = 1
    base_model: str | None = None
    model_path: str | None = None
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    prompt_logprobs_last_n: int | None = None
    target_prompt_logprobs: Any = None
    prompt_alt_tokens_k: int = 0
    record_stability_info: bool | None = None
    include_routed_experts: bool = False
    """Whether JSON answers have the experts that a mixture routed each position to; not the SDK's.
    """

    @property
    def attachment_options(self) -> AttachmentOptions:
        """Options of ``generate`` for what else answers have."""
        return {"routed_experts": True} if self.include_routed_experts else {}


class RetrieveFutureRequest(TinkerRequest, frozen=True, kw_only=True):
    """Body of ``retrieve_future``: a request whose result is awaited."""

    request_id: str
    allow_metadata_only: bool = False
    model_id: str | None = None
