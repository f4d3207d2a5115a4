"""Request bodies of SGLang's API, and their conversion to vLLM's sampling parameters.

As in SGLang, unknown fields of a body are ignored, and unknown sampling parameters refused.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import msgspec

from tidegate.serving.http.errors import ApiError
from tidegate.serving.openai.requests import CHOICES_MAX, TokenSampling, declaring, refuse_fields

NEW_TOKENS = 128
"""``max_new_tokens`` of a request that names none."""

TOP_K_ALL = 1 << 30
"""Value of ``top_k`` that SGLang's clients write for all tokens."""

GREEDY_BELOW = 1e-6
"""Temperature below which SGLang takes the likeliest token."""


class SglangSampling(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``sampling_params`` of ``/generate``."""

    max_new_tokens: int | None = NEW_TOKENS
    """Largest number of output tokens; None fills the context."""
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    min_new_tokens: int | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    logit_bias: dict[str, float] | None = None
    sampling_seed: int | None = None
    json_schema: str | None = None
    regex: str | None = None
    stream_interval: Any = None
    spaces_between_special_tokens: Any = None

    stop_regex: Any = None
    beam_width: Any = None
    ebnf: Any = None
    structural_tag: Any = None
    custom_params: Any = None
    watermark: Any = None

    REFUSED: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "stop_regex": ("", []),
        "beam_width": (1,),
        "ebnf": (),
        "structural_tag": (),
        "custom_params": ({},),
        "watermark": (),
    }

    @property
    def copies(self) -> int:
        """Number of outputs of each prompt.

        Raises:
            ApiError: it is less than 1.
        """
        if self.n is not None and self.n < 1:
            raise ApiError(400, f"n must be at least 1, got {self.n}.", param="n")
        return self.n or 1

    def as_sampling(
        self, copy: int, *, top_logprobs: int | None, prompt_logprobs: int | None
    ) -> TokenSampling:
        """Return vLLM's parameters of the ``copy``-th of ``n`` outputs; each copy has a seed of its
        own.

        Raises:
            ApiError: a parameter can't be honoured.
        """
        refuse_fields(self, self.REFUSED)
        temperature, seed = self.temperature, self.sampling_seed
        ignores_stops = bool(self.ignore_eos)
        outputs = {"json": self.json_schema, "regex": self.regex}
        wanted = {name: value for name, value in outputs.items() if value is not None}
        return TokenSampling(
            temperature=0.0
            if temperature is not None and temperature < GREEDY_BELOW
            else temperature,
            top_p=self.top_p,
            top_k=None if self.top_k == TOP_K_ALL else self.top_k,
            min_p=self.min_p,
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
            repetition_penalty=self.repetition_penalty,
            min_tokens=self.min_new_tokens,
            stop=self.stop,
            # SGLang ignores these too if it ignores the model's own.
            stop_token_ids=None if ignores_stops else self.stop_token_ids,
            ignore_eos=ignores_stops,
            skip_special_tokens=self.skip_special_tokens,
            include_stop_str_in_output=self.no_stop_trim,
            logit_bias=self.logit_bias,
            seed=None if seed is None else seed + copy,
            structured_outputs=wanted or None,
            logprobs=top_logprobs,
            prompt_logprobs=prompt_logprobs,
        )


class PromptRequest(msgspec.Struct, kw_only=True):
    """One prompt of a ``/generate`` request, with the fields that may differ between prompts."""

    text: str | None
    input_ids: list[int] | None
    rid: str | None
    sampling: SglangSampling
    return_logprob: bool
    logprob_start_len: int
    """First prompt token with log-probs; -1: none."""
    top_logprobs_num: int
    lora_path: str | None
    extra_key: str | None

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Number of likeliest tokens beside each prompt token; None: no log-probs of the prompt."""
        is_wanted = self.return_logprob and self.logprob_start_len >= 0
        return self.top_logprobs_num if is_wanted else None

    @property
    def num_top_logprobs(self) -> int | None:
        """Number of likeliest tokens beside each output token; None: no log-probs."""
        return self.top_logprobs_num if self.return_logprob else None


UNSERVED: Mapping[str, tuple[Any, ...]] = {
    "input_embeds": (),
    "image_data": ([],),
    "video_data": ([],),
    "audio_data": ([],),
    "token_ids_logprob": ([],),
    "return_sampling_mask": (False,),
    "return_flat_raw_top_logprobs": (False,),
    "return_flat_raw_output_top_logprobs": (False,),
    "return_hidden_states": (False,),
    "return_routed_experts": (False,),
    "return_indexer_topk": (False,),
    "return_entropy": (False,),
    "session_params": ({},),
    "custom_logit_processor": (),
    "positional_embed_overrides": (),
    "bootstrap_host": (),
    "max_thinking_tokens": (),
    "watermark": (),
}
"""Fields that change an answer and are not honoured, each with its harmless values."""

if TYPE_CHECKING:
    UnservedGenerate = msgspec.Struct
else:
    UnservedGenerate = declaring(UNSERVED)


class SglangGenerateRequest(UnservedGenerate, kw_only=True):
    """Body of ``POST /generate``: one prompt, or a list; then other fields may be lists as well."""

    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
    sampling_params: SglangSampling | list[SglangSampling] | None = None
    rid: str | list[str] | None = None
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: int | list[int] | None = None
    top_logprobs_num: int | list[int] | None = None
    lora_path: str | list[str | None] | None = None
    extra_key: str | list[str] | None = None
    return_text_in_logprobs: bool = False
    return_prompt_token_ids: bool = False
    stream: bool = False

    REFUSED: ClassVar[Mapping[str, tuple[Any, ...]]] = UNSERVED

    PER_PROMPT: ClassVar[tuple[str, ...]] = (
        "sampling_params",
        "return_logprob",
        "logprob_start_len",
        "top_logprobs_num",
        "lora_path",
        "extra_key",
    )
    """Fields that may have a list with a value for each prompt."""

    @property
    def is_list(self) -> bool:
        """Whether the answer is a list: for several prompts, or several outputs of one prompt."""
        ids, params = self.input_ids, self.sampling_params
        has_prompts = isinstance(self.text, list) or bool(ids and isinstance(ids[0], list))
        return has_prompts or (isinstance(params, SglangSampling) and params.copies > 1)

    def prompts(self) -> list[PromptRequest]:
        """Return the prompts with their parameters.

        Raises:
            ApiError: there is no prompt, or a list has not one entry for each.
        """
        refuse_fields(self, self.REFUSED)
        if (self.text is None) == (self.input_ids is None):
            raise ApiError(400, "Either text or input_ids should be provided.")
        texts = [self.text] if isinstance(self.text, str) else self.text or []
        ids = self.input_ids or []
        many = [each for each in ids if isinstance(each, list)]
        if many and len(many) < len(ids):
            raise ApiError(400, "input_ids are token ids, or lists of token ids")
        if self.input_ids is not None and not many:
            many = [[each for each in ids if isinstance(each, int)]]
        size = len(texts) or len(many)
        if not 1 <= size <= CHOICES_MAX:
            raise ApiError(400, f"a request has 1 to {CHOICES_MAX} prompts, got {size}")
        rids = self.rid
        if isinstance(rids, str):  # as SGLang names the parts of a batch
            rids = [rids] if size == 1 else [f"{rids}_{i}" for i in range(size)]
        columns = {n: self._for_each(size, n, getattr(self, n)) for n in self.PER_PROMPT}
        columns["rid"] = self._for_each(size, "rid", rids)
        rows = [{name: column[i] for name, column in columns.items()} for i in range(size)]
        return [
            PromptRequest(
                text=texts[i] if texts else None,
                input_ids=many[i] if many else None,
                rid=row["rid"],
                sampling=row["sampling_params"] or SglangSampling(),
                return_logprob=bool(row["return_logprob"]),
                logprob_start_len=-1
                if row["logprob_start_len"] is None
                else row["logprob_start_len"],
                top_logprobs_num=row["top_logprobs_num"] or 0,
                lora_path=row["lora_path"],
                extra_key=row["extra_key"],
            )
            for i, row in enumerate(rows)
        ]

    def _for_each(self, size: int, name: str, value: Any) -> list[Any]:
        if not isinstance(value, list):
            return [value] * size
        if len(value) != size:
            raise ApiError(400, f"{name} has {len(value)} entries for {size} prompts", param=name)
        return value


class SglangAbortRequest(msgspec.Struct, kw_only=True):
    """Body of ``POST /abort_request``; a request without an id is ignored."""

    rid: str | None = None
    abort_all: bool = False


class PauseRequest(msgspec.Struct, kw_only=True):
    """Body of ``POST /pause_generation``."""

    mode: Literal["abort", "retract", "in_place"] = "abort"


class WeightRequest(msgspec.Struct, kw_only=True):
    """Fields that all requests for new weights share."""

    weight_version: str | None = None
    load_format: str | None = None
    flush_cache: bool = True
    abort_all_requests: bool = False


class DiskUpdateRequest(WeightRequest, kw_only=True):
    """Body of ``POST /update_weights_from_disk``."""

    model_path: str


class TensorUpdateRequest(WeightRequest, kw_only=True):
    """Body of ``POST /update_weights_from_tensor``: base64 of a pickle for each rank."""

    serialized_named_tensors: list[str]


class DistributedUpdateRequest(WeightRequest, kw_only=True):
    """Body of ``POST /update_weights_from_distributed``: tensors as they are broadcast."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    group_name: str = "weight_update_group"


class GroupRequest(msgspec.Struct, kw_only=True):
    """Body of ``POST /init_weights_update_group``."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str = "weight_update_group"
    backend: str = "nccl"


class GroupNameRequest(msgspec.Struct, kw_only=True):
    """Body of ``POST /destroy_weights_update_group``."""

    group_name: str = "weight_update_group"


class SglangUnloadRequest(msgspec.Struct, kw_only=True):
    """Body of ``POST /unload_lora_adapter``."""

    lora_name: str


class MemoryRequest(msgspec.Struct, kw_only=True):
    """Body of ``/release_memory_occupation`` and ``/resume_memory_occupation``; no tags: all."""

    tags: list[str] | None = None
