"""One weight version in the layout that Tidegate's forward pass computes with.

The LM head is float32 whatever the dtype. Matrices are packed for the fastest product while they
are copied, at some GB/s, on the thread that loads them. One object is reused for update after
update, because the first touch of fresh pages costs more than the copy.

Letters in shapes: V vocabulary, H hidden size, L labels, T tokens, S output tokens.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from tidegate.engine.models.checkpoint import read_tensors
from tidegate.engine.models.layer_weights import (
    LayerWeights,
    allocate_layer,
    joint_targets,
)
from tidegate.engine.models.model_config import ModelConfig
from tidegate.engine.models.shards import WHOLE, TensorShard
from tidegate.engine.weights.lora import Adapter, MatrixLayout, make_adapter
from tidegate.engine.weights.weight_store import CopyTarget, WeightStore
from tidegate.errors import ModelError, WeightsRefused
from tidegate.kernels.exact_matrix import ExactMatrix, make_exact_matrix
from tidegate.kernels.rounded_matrix import Fp8Matrix, make_int8_matrix
from tidegate.kernels.weight_matrix import Matrix, PackedMatrix, make_matrix

if TYPE_CHECKING:  # torch.distributed is for engines of several ranks
    from tidegate.engine.models.rank_group import RankGroup


Quantization = Literal["int8", "fp8"]
"""Format of rounded layer weights: one byte each, and a scale per output."""


def make_rounded_matrix(
    outputs: int, inputs: int, *, dtype: torch.dtype, quantization: Quantization
) -> Matrix:
    """Allocate a quantized matrix for activations of ``dtype``."""
    make = Fp8Matrix if quantization == "fp8" else make_int8_matrix
    return make(outputs, inputs, dtype)


class Weights(WeightStore):
    """All tensors of one version, for Tidegate's own forward pass."""

    def __init__(
        self,
        config: ModelConfig,
        embedding: Matrix,
        layers: list[LayerWeights],
        final_norm: torch.Tensor,
        head: Matrix,
        shard: TensorShard = WHOLE,
        group: "RankGroup | None" = None,
    ) -> None:
        self.adapters: Mapping[str, Adapter]
        self.shard = shard
        """The tensor-parallel rank's part of the model."""
        self.group = group
        """Communication group of the tensor-parallel ranks; None with one rank."""
        self.whole_config = config
        self.config = shard.local(config)
        """Config with this rank's sizes; ``whole_config`` has the sizes of the whole model."""
        self.embedding = embedding
        """Token embedding, [V, H]."""
        self.layers = layers
        self.final_norm = final_norm
        """Gain of the norm before the LM head, [H]."""
        self.head = head
        """[V, H], float32; the embedding itself if tied and float32. [L, H] of a
        classification head."""
        joint: dict[str, CopyTarget] = {}
        for number, layer in enumerate(layers):
            joint.update(joint_targets(layer, f"model.layers.{number}.", self.config.experts))
        model = f"{config.architecture} of {config.num_layers} layers"
        super().__init__(model, dict(_copy_targets(self)), joint=joint)

    @classmethod
    def allocate(
        cls,
        config: ModelConfig,
        dtype: torch.dtype,
        *,
        is_packed: bool | None = None,
        quantization: Quantization | None = None,
        shard: TensorShard = WHOLE,
        group: "RankGroup | None" = None,
    ) -> "Weights":
        """Allocate one version, uninitialised; the head is float32 whatever ``dtype`` is.

        ``is_packed`` chooses the matrices' layout; None takes the faster on this machine.
        ``quantization`` rounds the layers' matrices except the router. With a ``shard`` only that
        part is allocated, and ``group`` connects it to the other ranks.
        """
        local = shard.local(config)
        vocabulary = (shard.vocabulary_rows(config), config.hidden_size)
        outputs = config.labels or vocabulary[0]
        head = make_exact_matrix(outputs, config.hidden_size, dtype, is_packed=is_packed)
        shares_head = config.tied_head and dtype == torch.float32
        exact = partial(make_matrix, dtype=dtype, is_packed=is_packed)
        matrix = (
            exact
            if quantization is None
            else partial(make_rounded_matrix, dtype=dtype, quantization=quantization)
        )
        return cls(
            config,
            head if shares_head else make_matrix(*vocabulary, dtype, is_packed=False),
            [allocate_layer(local, shape, dtype, matrix, exact) for shape in local.layers],
            torch.empty(config.hidden_size, dtype=dtype),
            head,
            shard,
            group,
        )

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return the embeddings [T, H] of tokens [T]."""
        if self.group is None:
            return self.embedding.take(token_ids)
        local_rows = self.shard.vocabulary(self.whole_config)
        local_ids = token_ids - local_rows.first
        is_remote = (local_ids < 0) | (local_ids >= local_rows.count)
        embedded = self.embedding.take(local_ids.masked_fill(is_remote, 0))
        embedded[is_remote] = 0.0
        self.group.all_reduce_(embedded)
        return embedded

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the head's output for normed hidden states [S, H], float32: [S, V] or [S, L]."""
        head = self.head
        logits = head.linear(hidden if isinstance(head, ExactMatrix) else hidden.float())
        if self.group is None or self.config.labels:
            return logits
        return self.group.all_gather(logits)[:, : self.config.vocab_size]

    def is_redundant(self, name: str) -> bool:
        """Whether it is a tied head, or the rotary frequencies of an old Llama directory."""
        tied = self.config.tied_head and name == "lm_head.weight"
        return tied or name.endswith(".rotary_emb.inv_freq")

    def make_adapter(self, tensors: Mapping[str, torch.Tensor], scale: float) -> Adapter:
        """Make a LoRA adapter for this model from tensors named as in the protocol."""
        layout = MatrixLayout(self.dtype, self.is_packed)
        layers = self.config.num_layers
        return make_adapter(tensors, scale, self._copy_targets, num_layers=layers, layout=layout)

    def tied_to(self, name: str) -> str | None:
        """Return the embedding's name for a tied model's head."""
        return "model.embed_tokens.weight" if name == "lm_head.weight" else None

    @property
    def is_packed(self) -> bool:
        """Whether matrices are packed, so that a row's product has the same bits in every batch."""
        return isinstance(self.head, PackedMatrix)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype in which everything but the head is stored and computed."""
        return self.embedding.dtype


def load_directory(
    path: Path, config: ModelConfig, dtype: torch.dtype, *, is_packed: bool | None = None
) -> Weights:
    """Load a Hugging Face directory; ``is_packed`` as in :meth:`Weights.allocate`.

    Raises:
        ModelError: files are missing or damaged, or do not fit ``config``.
    """
    weights = Weights.allocate(config, dtype, is_packed=is_packed)
    fill_from_directory(weights, path)
    return weights


def fill_from_directory(
    weights: WeightStore, path: Path, heartbeat: Callable[[], None] = lambda: None
) -> None:
    """Overwrite weights from a Hugging Face directory, calling ``heartbeat`` after each tensor.

    Raises:
        ModelError: files are missing or damaged, or do not fit the weights.
    """
    weights.start()
    for name, tensor in read_tensors(path):
        try:
            weights.load(name, tensor)
        except WeightsRefused as error:
            raise ModelError(
                f"{path}: its tensors do not fit its config.json: {error}. Download or save both "
                "again"
            ) from error
        heartbeat()
    refuse_lacking(path, weights.missing())
    weights.keep_draft(None)


def refuse_lacking(path: Path, names: Sequence[str]) -> None:
    """Raise an error if the model directory ``path`` lacks the tensors ``names``.

    Raises:
        ModelError: ``names`` is not empty.
    """
    if names:
        raise ModelError(
            f"{path} lacks {len(names)} of the tensors that config.json describes, first "
            f"{names[0]}; download or save the model again"
        )


def _copy_targets(weights: Weights) -> Iterator[tuple[str, CopyTarget]]:
    config, shard = weights.config, weights.shard
    local_rows = shard.vocabulary(config)
    part = None if shard.is_whole else local_rows
    embedding = [weights.embedding.rows(0, local_rows.count)]
    head = weights.head.rows(0, config.labels or local_rows.count)
    if config.tied_head and weights.head is not weights.embedding:
        embedding.append(head)
    vocabulary = (config.vocab_size, config.hidden_size)
    yield "model.embed_tokens.weight", CopyTarget(vocabulary, tuple(embedding), part=part)
    for number, layer in enumerate(weights.layers):
        for name, target in shard.layer_targets(layer, config, weights.whole_config):
            yield f"model.layers.{number}.{name}", target
    yield "model.norm.weight", CopyTarget((config.hidden_size,), (weights.final_norm,))
    if not config.tied_head:
        if config.labels:
            yield "score.weight", CopyTarget(weights.head.shape, (head,))
        else:
            yield "lm_head.weight", CopyTarget(vocabulary, (head,), part=part)
