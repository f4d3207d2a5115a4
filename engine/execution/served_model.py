"""Whose code computes the model in this directory? Ours where it can, transformers' where not.

It knows nothing of turns or messages: it makes what runs steps, and what new weights go into. Both
kinds keep one contract, so that nothing above them asks which it is.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

import torch

from tidegate.engine.execution.runner import ModelRunner, Runner
from tidegate.engine.memory.memory import blame_memory
from tidegate.engine.models.checkpoint import has_other_head
from tidegate.engine.models.model import native_for
from tidegate.engine.models.model_config import ModelConfig
from tidegate.engine.models.model_weights import Quantization, Weights, fill_from_directory
from tidegate.engine.models.shards import WHOLE, Shard
from tidegate.engine.sampling.scoring import HIDDEN_WANTS, ScoringTraits
from tidegate.engine.weights.weight_store import WeightStore
from tidegate.errors import ConfigError, ModelError, ModelNotComputed
from tidegate.kernels.native import Native

if TYPE_CHECKING:  # transformers takes seconds to import, and our own models do without it
    from tidegate.engine.models.fallback_weights import FallbackWeights
    from tidegate.engine.models.rank_group import RankGroup

DtypeChoice = Literal["auto", "float32", "bfloat16"]
"""What to compute in; ``auto``: as the model directory says."""

SMALLER_MODEL = "serve a smaller model, compute in bfloat16, or leave the machine more"
"""What helps where the weights don't fit."""


NAMES_SHOWN_MAX = 3
"""Tensors that a warning names; the kind of them shows in a few."""


class ServedModel(Protocol):
    """A model that an engine can serve."""

    @property
    def architecture(self) -> str:
        """As in config.json, e.g. ``Qwen3ForCausalLM``."""

    @property
    def vocab_size(self) -> int:
        """How many tokens there are."""

    @property
    def dtype(self) -> str:
        """What it is computed in, as torch spells it; the LM head is always float32."""

    @property
    def context_tokens_max(self) -> int:
        """How long a context may be."""

    @property
    def code(self) -> str:
        """Whose code computes it: ``tidegate`` or ``transformers``."""

    @property
    def scoring(self) -> ScoringTraits:
        """What it can tell of given tokens."""

    @property
    def warning(self) -> str | None:
        """What whoever starts the engine should know of it."""

    def kv_token_bytes(self) -> int:
        """What keys and values of one position take, in all layers."""

    def make_runner(self, *, num_blocks: int, block_tokens: int) -> Runner:
        """Load what isn't yet, and make room for the KV cache."""

    def allocate(self) -> WeightStore:
        """Make room for a second version beside the one that serves."""

    def reload(self, weights: WeightStore, beat: Callable[[], None]) -> None:
        """Fill what was allocated, or loaded, from the model directory again.

        ``beat`` is called now and then, as far as the model's code can.

        Raises:
            ModelError: it isn't there any more as it was.
        """


def open_model(
    path: Path,
    dtype: DtypeChoice,
    *,
    is_deterministic: bool = False,
    quantize: Quantization | None = None,
    shard: Shard = WHOLE,
    group: "RankGroup | None" = None,
) -> ServedModel:
    """Find out who can compute the model in ``path``; of a ``shard``, that part, with ``group``.

    Raises:
        ModelError: nobody can.
        ConfigError: nobody can so that each turn gets the same bits in every batch, or by parts, or
            in bytes.
    """
    try:
        config = ModelConfig.from_directory(path)
        return OwnModel(
            path,
            config,
            dtype,
            is_deterministic=is_deterministic,
            quantize=quantize,
            shard=shard,
            group=group,
        )
    except ModelNotComputed as error:
        if quantize is not None:
            raise ConfigError(
                f"quantize={quantize!r}: {error}, and what transformers computes is in full "
                f"precision; serve another model, or leave quantize out"
            ) from error
        if not shard.is_whole:
            raise ConfigError(
                f"tensor_parallel={shard.ranks}: {error}, and what transformers computes is "
                f"computed by one process; serve another model, or leave tensor_parallel out"
            ) from error
        if is_deterministic:
            raise ConfigError(
                f"deterministic: {error}, and what transformers computes depends on how a context "
                f"was cut; serve another model, or leave deterministic out"
            ) from error
        return FallbackModel(path, dtype, why=str(error))


class OwnModel:
    """A model that our own code computes."""

    code = "tidegate"

    def __init__(
        self,
        path: Path,
        config: ModelConfig,
        dtype: DtypeChoice,
        *,
        is_deterministic: bool = False,
        quantize: Quantization | None = None,
        shard: Shard = WHOLE,
        group: "RankGroup | None" = None,
    ) -> None:
        if quantize == "fp8" and is_deterministic:
            raise ConfigError(
                "deterministic: products of fp8 weights are torch's, whose sums depend on the "
                "batch; quantize to 'int8', or leave one out"
            )
        self._path = path
        self._quantize = quantize
        warnings = []
        if config.tied_head and has_other_head(path):
            config = replace(config, tied_head=False)
            warnings.append(
                f"{path} has tie_word_embeddings=true and an lm_head.weight that differs from its "
                f"embedding. It is served untied, as transformers loads it; set "
                f"tie_word_embeddings=false in config.json, for vLLM and SGLang pass over that head"
            )
        self._config = config
        self._shard = shard
        self._group = group
        self._local = shard.local(config)
        self._dtype = _dtype(dtype, config.dtype)
        warnings += _widening(path, dtype, config.dtype)
        self.warning = ". ".join(warnings) or None
        self._is_deterministic = is_deterministic
        self._native = self._find_native()
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
        self.scoring = ScoringTraits(
            hidden_size=config.hidden_size,
            wants=("rewards" if config.labels else "logprobs", *HIDDEN_WANTS),
            labels=config.labels,
            pad_token_id=config.pad_token_id,
        )

    @property
    def dtype(self) -> str:
        """As :attr:`ServedModel.dtype`."""
        return str(self._dtype).removeprefix("torch.")

    def kv_token_bytes(self) -> int:
        """What keys and values of one position take, in all layers; on each rank."""
        config = self._local
        elements = 2 * config.num_layers * config.num_kv_heads * config.head_dim
        return elements * int(self._dtype.itemsize)

    def make_runner(self, *, num_blocks: int, block_tokens: int) -> Runner:
        """Load the weights, and make room for the KV cache."""
        with blame_memory(doing=f"for the weights of {self._path}", remedy=SMALLER_MODEL):
            weights = self.allocate()
            fill_from_directory(weights, self._path)
        return ModelRunner(
            self._local,
            weights,
            num_blocks=num_blocks,
            block_tokens=block_tokens,
            native=self._native,
            is_deterministic=self._is_deterministic,
        )

    def allocate(self) -> Weights:
        """Make room for a second version."""
        return Weights.allocate(
            self._config,
            self._dtype,
            is_packed=self._packs,
            quantize=self._quantize,
            shard=self._shard,
            group=self._group,
        )

    def _find_native(self) -> Native | None:
        """Compiled code for the model, if there is any."""
        return native_for(self._config, self._dtype)

    @property
    def _packs(self) -> bool | None:
        """How matrices lie; None: as is fastest. Packed ones compute the same bits in any batch."""
        return True if self._is_deterministic else None

    def reload(self, weights: WeightStore, beat: Callable[[], None]) -> None:
        """Fill what was allocated, or loaded, from the model directory again."""
        fill_from_directory(weights, self._path, beat)


class FallbackModel:
    """A model that transformers computes; its weights are loaded at once, to see whether it can."""

    code = "transformers"

    def __init__(self, path: Path, dtype: DtypeChoice, *, why: str) -> None:
        from tidegate.engine.execution import fallback
        from tidegate.engine.models import fallback_weights

        try:
            config = fallback_weights.read_config(path)
            with blame_memory(doing=f"for the weights of {path}", remedy=SMALLER_MODEL):
                self._path = path
                stored = dtype_name(config.dtype)
                self._dtype = _dtype(dtype, stored)
                weights = fallback_weights.load_fallback(path, self._dtype)
            self.vocab_size: int = config.get_text_config().vocab_size
            fallback.refuse_other_state(weights.module, self.vocab_size)
        except ModelError as error:
            raise ModelError(f"{why}; and {error}") from error
        self._live: FallbackWeights = weights
        self._runners = fallback.FallbackRunner
        self._kv_token_bytes = fallback.kv_token_bytes(weights.module)
        self.architecture = type(weights.module).__name__
        self.context_tokens_max = min(
            fallback_weights.context_tokens_max(config),
            *fallback_weights.learned_positions(weights.module),
            sys.maxsize,
        )
        has_head = weights.module.get_output_embeddings() is not None
        self.scoring = ScoringTraits(
            hidden_size=config.get_text_config().hidden_size,
            wants=("logprobs", *(HIDDEN_WANTS if has_head else ())),
        )
        warnings = [
            f"{why}. So transformers computes it: the same tokens and log-probs, one turn after "
            f"another, many times slower",
            *_widening(path, dtype, stored),
            *fallback_weights.shortened_context(config),
            *_passed_over(path, weights.passed_over),
        ]
        self.warning = ". ".join(warnings)

    @property
    def dtype(self) -> str:
        """As :attr:`ServedModel.dtype`."""
        return str(self._dtype).removeprefix("torch.")

    def kv_token_bytes(self) -> int:
        """What keys and values of one position take, in all layers."""
        return self._kv_token_bytes

    def make_runner(self, *, num_blocks: int, block_tokens: int) -> Runner:
        """Make room for the KV cache."""
        return self._runners(self._live, num_blocks=num_blocks, block_tokens=block_tokens)

    def allocate(self) -> "FallbackWeights":
        """Make room for a second version."""
        return self._live.twin()

    def reload(self, weights: WeightStore, beat: Callable[[], None]) -> None:
        """Fill what was allocated, or loaded, from the model directory again."""
        from tidegate.engine.models.fallback_weights import load_fallback

        weights.start()
        for name, tensor in load_fallback(self._path, self._dtype).module.state_dict().items():
            weights.load(name, tensor)
            beat()


def _dtype(asked: DtypeChoice, stored: str) -> torch.dtype:
    """Return what to compute in. A float16 directory is computed in float32, which holds each of
    its numbers exactly; bfloat16 would round them to 8 bits of 11."""
    name = stored if asked == "auto" else asked
    return torch.bfloat16 if name == "bfloat16" else torch.float32


def _widening(path: Path, asked: DtypeChoice, stored: str) -> list[str]:
    """Say that a float16 directory takes twice its own size, if that was not asked for."""
    if asked != "auto" or stored != "float16":
        return []
    return [
        f"{path} is in float16 and is computed in float32, exactly, in twice the memory; "
        f"dtype='bfloat16' takes half of that, and rounds its weights"
    ]


def _passed_over(path: Path, names: frozenset[str]) -> list[str]:
    """Name tensors of the directory that the model doesn't compute with."""
    if not names:
        return []
    return [
        f"transformers' model has no use for {len(names)} tensors of {path}, and passes over them: "
        f"{', '.join(sorted(names)[:NAMES_SHOWN_MAX])}"
    ]


def dtype_name(dtype: object) -> str:
    """A dtype as torch spells it, without its module."""
    return str(dtype).removeprefix("torch.")
