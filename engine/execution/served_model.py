"""Opens a model directory: Tidegate's own implementation if there is one, transformers' otherwise.

The rest of the engine does not distinguish the two implementations of ``ServedModel``.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from typing_extensions import override

from tidegate.engine.execution.runner import ModelRunner, Runner, refused_options
from tidegate.engine.memory.out_of_memory import blame_memory
from tidegate.engine.models.checkpoint import has_other_head
from tidegate.engine.models.model import native_for
from tidegate.engine.models.model_config import ModelConfig
from tidegate.engine.models.model_weights import Quantization, Weights, fill_from_directory
from tidegate.engine.models.shards import WHOLE, TensorShard
from tidegate.engine.sampling.scoring import HIDDEN_STATE_SCORES, ScoringCapabilities
from tidegate.engine.weights.weight_store import WeightStore
from tidegate.errors import ConfigError, ModelError, ModelNotComputed
from tidegate.kernels.weight_matrix import packs
from tidegate.transport.images import ImageReader, open_images

if TYPE_CHECKING:  # transformers takes seconds to import, and Tidegate's own models do not need it
    from tidegate.engine.models.fallback_weights import FallbackWeights
    from tidegate.engine.models.rank_group import RankGroup

DtypeChoice = Literal["auto", "float32", "bfloat16"]
"""Dtype to compute in; ``auto`` takes the model directory's."""

SMALLER_MODEL = "serve a smaller model, compute in bfloat16, or leave the machine more"
"""Advice in the error for weights that do not fit into memory."""


NAMES_SHOWN_MAX = 3
"""Number of tensor names in a warning."""


class ServedModel:
    """A model that an engine can serve."""

    architecture: str
    """Architecture as in config.json, e.g. ``Qwen3ForCausalLM``."""
    vocab_size: int
    context_tokens_max: int
    """Longest context, in tokens."""
    code: str
    """Whose code computes the model: ``tidegate`` or ``transformers``."""
    is_deterministic: bool = False
    """Whether a turn's bits depend neither on its batch nor on how its context is chunked."""
    scoring: ScoringCapabilities
    """Kinds of scores that the model can compute for given tokens."""
    refused_options: Mapping[str, str]
    """Options for attachments that the model cannot make, each with the reason."""
    images: ImageReader | None = None
    """Reader of the model's images; None if it reads none."""
    warning: str | None
    """Warning to print when the engine starts; None if there is none."""
    _dtype: torch.dtype

    @property
    def dtype(self) -> str:
        """Compute dtype in torch's spelling; the LM head is always float32."""
        return dtype_name(self._dtype)

    def kv_token_bytes(self) -> int:
        """Return the bytes of one position's keys and values in all layers, on each rank."""
        raise NotImplementedError

    def state_bytes(self) -> int:
        """Return the bytes of one context's recurrent state in all layers; each KV block holds one
        such state. 0 for a model of attention only."""
        return 0

    def make_runner(self, *, num_blocks: int, block_tokens: int) -> Runner:
        """Load the weights if they are not loaded, allocate the KV cache, and return the runner."""
        raise NotImplementedError

    def allocate(self) -> WeightStore:
        """Allocate memory for a second weight version beside the live one."""
        raise NotImplementedError

    def reload(self, weights: WeightStore, heartbeat: Callable[[], None]) -> None:
        """Fill ``weights`` from the model directory again, calling ``heartbeat`` for heartbeats.

        Raises:
            ModelError: the directory is gone or has changed.
        """
        raise NotImplementedError


def open_model(
    path: Path,
    dtype: DtypeChoice,
    *,
    is_deterministic: bool | None = False,
    quantization: Quantization | None = None,
    shard: TensorShard = WHOLE,
    group: "RankGroup | None" = None,
    image_directories: Sequence[Path] = (),
) -> ServedModel:
    """Open the model in ``path``, or its part for a tensor-parallel ``shard`` with its ``group``.

    ``is_deterministic``: None makes a model so where that costs nearly nothing.
    ``image_directories``: those from which images may be read by path.

    Raises:
        ModelError: neither implementation can compute it.
        ConfigError: only transformers can, and a setting needs Tidegate's implementation:
            deterministic, tensor parallel or quantized.
    """
    try:
        config = ModelConfig.from_directory(path)
        return OwnModel(
            path,
            config,
            dtype,
            is_deterministic=is_deterministic,
            quantization=quantization,
            shard=shard,
            group=group,
        )
    except ModelNotComputed as error:
        if quantization is not None:
            raise ConfigError(
                f"quantization={quantization!r}: {error}, and transformers computes in full "
                f"precision; serve another model, or leave quantization out"
            ) from error
        if not shard.is_whole:
            raise ConfigError(
                f"tensor_parallel_size={shard.ranks}: {error}, and transformers computes a model "
                f"in one process; serve another model, or leave tensor_parallel_size out"
            ) from error
        if is_deterministic:
            raise ConfigError(
                f"deterministic: {error}, and results of transformers depend on the chunking of a "
                f"context; serve another model, or leave deterministic out"
            ) from error
        return FallbackModel(path, dtype, reason=str(error), image_directories=image_directories)


class OwnModel(ServedModel):
    """A model with Tidegate's own implementation, on the CPU."""

    code = "tidegate"

    def __init__(
        self,
        path: Path,
        config: ModelConfig,
        dtype: DtypeChoice,
        *,
        is_deterministic: bool | None = False,
        quantization: Quantization | None = None,
        shard: TensorShard = WHOLE,
        group: "RankGroup | None" = None,
    ) -> None:
        if quantization == "fp8" and is_deterministic:
            raise ConfigError(
                "deterministic: products of fp8 weights are torch's, whose sums depend on the "
                "batch; set quantization='int8', or leave one out"
            )
        self._path = path
        self.draft: OwnModel | None = None
        """Draft model whose weights are part of each version; None if there is none."""
        self._quantization = quantization
        warnings = []
        if config.tied_head and has_other_head(path):
            config = replace(config, tied_head=False)
            warnings.append(
                f"{path} has tie_word_embeddings=true and an lm_head.weight that differs from its "
                f"embedding. It is served untied, as transformers loads it; set "
                "tie_word_embeddings=false in config.json, because vLLM and SGLang ignore that "
                "head"
            )
        self._config = config
        self._shard = shard
        self._group = group
        self._local = shard.local(config)
        self._dtype = _dtype(dtype, config.dtype)
        warnings += _widening_warnings(path, dtype, config.dtype)
        self.warning = ". ".join(warnings) or None
        self._native = native_for(self._config, self._dtype)
        if is_deterministic is None:
            # Rounding to bfloat16 makes differences of batches large enough to hide a version's
            # from an audit. Matrices are packed anyway, so only attention to prompts is computed
            # otherwise: faster up to 1,024 positions, slower by 9 % at 2,048.
            is_rounded = self._dtype == torch.bfloat16 and packs(self._dtype)
            is_own = self._native is not None and shard.is_whole and quantization is None
            is_deterministic = is_rounded and is_own
        self.is_deterministic = is_deterministic
        if is_deterministic and self._native is None:
            raise ConfigError(
                f"deterministic: this machine has no compiled code for {config.architecture} in "
                f"{self._dtype} (head_dim={config.head_dim}, activation={config.activation}), and "
                f"torch's sums depend on the batch; install a C++ compiler, serve another model, "
                f"or leave deterministic out"
            )
        self.architecture = config.architecture
        self.vocab_size = config.vocab_size
        self.context_tokens_max = config.context_tokens_max
        self.refused_options = refused_options(config)
        self.scoring = ScoringCapabilities(
            hidden_size=config.hidden_size,
            score_kinds=("rewards" if config.labels else "logprobs", *HIDDEN_STATE_SCORES),
            labels=config.labels,
            pad_token_id=config.pad_token_id,
        )

    @override
    def kv_token_bytes(self) -> int:
        config = self._local
        elements = 2 * config.num_layers * config.num_kv_heads * config.head_dim
        return elements * int(self._dtype.itemsize)

    @override
    def make_runner(self, *, num_blocks: int, block_tokens: int) -> Runner:
        with blame_memory(doing=f"for the weights of {self._path}", remedy=SMALLER_MODEL):
            weights = self.allocate()
            fill_from_directory(weights, self._path)
        return ModelRunner(
            self._local,
            weights,
            num_blocks=num_blocks,
            block_tokens=block_tokens,
            native=self._native,
            is_deterministic=self.is_deterministic,
        )

    @override
    def allocate(self) -> Weights:
        weights = Weights.allocate(
            self._config,
            self._dtype,
            # Packed matrices give the same bits in any batch; None chooses the fastest.
            is_packed=True if self.is_deterministic else None,
            quantization=self._quantization,
            shard=self._shard,
            group=self._group,
        )
        if self.draft is not None:
            self.draft.attach_to(weights, self.draft.allocate())
        return weights

    def attach_to(self, weights: WeightStore, draft: WeightStore) -> None:
        """Make ``draft``, weights of this model, part of the weights of a model that it drafts
        for."""
        weights.attach_draft(draft, lambda: fill_from_directory(draft, self._path))

    @override
    def reload(self, weights: WeightStore, heartbeat: Callable[[], None]) -> None:
        fill_from_directory(weights, self._path, heartbeat)


class FallbackModel(ServedModel):
    """A model that transformers implements; its weights are loaded at once, as a check."""

    code = "transformers"

    def __init__(
        self,
        path: Path,
        dtype: DtypeChoice,
        *,
        reason: str,
        image_directories: Sequence[Path] = (),
    ) -> None:
        from tidegate.engine.execution import fallback
        from tidegate.engine.models import fallback_weights

        try:
            config = fallback_weights.read_config(path)
            self.images = open_images(path, image_directories)
            with blame_memory(doing=f"for the weights of {path}", remedy=SMALLER_MODEL):
                self._path = path
                stored = dtype_name(config.dtype)
                self._dtype = _dtype(dtype, stored)
                weights = fallback_weights.load_fallback(path, self._dtype)
            self.vocab_size: int = config.get_text_config().vocab_size
            self.context_tokens_max = min(
                fallback_weights.context_tokens_max(config),
                *fallback_weights.learned_positions(weights.module),
                sys.maxsize,
            )
            self._probed = fallback.probe(
                weights.module, self.vocab_size, context_tokens_max=self.context_tokens_max
            )
        except ModelError as error:
            raise ModelError(f"{reason}; and {error}") from error
        self._live: FallbackWeights = weights
        self._runners = fallback.FallbackRunner
        self.architecture = type(weights.module).__name__
        self.refused_options = fallback.refused_options(weights.module)
        has_head = weights.module.get_output_embeddings() is not None
        self.scoring = ScoringCapabilities(
            hidden_size=config.get_text_config().hidden_size,
            score_kinds=("logprobs", *(HIDDEN_STATE_SCORES if has_head else ())),
            image_token_id=None if self.images is None else self.images.placeholder_id,
        )
        warnings = [
            f"{reason}. So transformers computes it: the same tokens and log-probs, "
            + ("several" if self._probed.is_batched else "one turn after another, many")
            + " times slower",
            *_widening_warnings(path, dtype, stored),
            *fallback_weights.shortened_context(config),
            *_unused_tensor_warnings(path, weights.unused_names),
        ]
        self.warning = ". ".join(warnings)

    @override
    def kv_token_bytes(self) -> int:
        return self._probed.token_bytes

    @override
    def state_bytes(self) -> int:
        return self._probed.state_bytes

    @override
    def make_runner(self, *, num_blocks: int, block_tokens: int) -> Runner:
        return self._runners(
            self._live,
            num_blocks=num_blocks,
            block_tokens=block_tokens,
            is_batched=self._probed.is_batched,
            images=self.images,
        )

    @override
    def allocate(self) -> "FallbackWeights":
        return self._live.allocate_copy()

    @override
    def reload(self, weights: WeightStore, heartbeat: Callable[[], None]) -> None:
        from tidegate.engine.models.fallback_weights import load_fallback

        weights.start()
        for name, tensor in load_fallback(self._path, self._dtype).module.state_dict().items():
            weights.load(name, tensor)
            heartbeat()


def _dtype(choice: DtypeChoice, stored: str) -> torch.dtype:
    """Return the compute dtype. A float16 directory is computed in float32, which represents each
    of its numbers exactly; bfloat16 would round their 11-bit significands to 8 bits."""
    name = stored if choice == "auto" else choice
    return torch.bfloat16 if name == "bfloat16" else torch.float32


def _widening_warnings(path: Path, choice: DtypeChoice, stored: str) -> list[str]:
    """Return a warning that a float16 directory takes twice its size, unless a dtype was chosen."""
    if choice != "auto" or stored != "float16":
        return []
    return [
        f"{path} is in float16 and is computed in float32, exactly, in twice the memory; "
        f"dtype='bfloat16' takes half of that, and rounds its weights"
    ]


def _unused_tensor_warnings(path: Path, names: frozenset[str]) -> list[str]:
    if not names:
        return []
    return [
        f"transformers' model ignores {len(names)} tensors of {path}: "
        f"{', '.join(sorted(names)[:NAMES_SHOWN_MAX])}"
    ]


def dtype_name(dtype: object) -> str:
    """Return a dtype's name without ``torch.``."""
    return str(dtype).removeprefix("torch.")
