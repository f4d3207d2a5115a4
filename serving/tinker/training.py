"""Protocol of a training backend, and the records that pass through it.

:mod:`models` calls a backend from one thread of its own. The records are numpy arrays.
:mod:`peft_training` is the reference; other trainers (FSDP, Megatron) implement
:class:`TrainingBackend`. Letters in shapes: N positions of a sequence, K targets of one position.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

LORA_ALPHA = 32
"""``lora_alpha`` of every adapter, as in the Tinker service: learning rates carry over."""

ADAM_BETAS, ADAM_EPS = (0.9, 0.95), 1e-12
"""The Tinker API's defaults of :class:`AdamStep`."""


class UserError(ValueError):
    """A request that can never be carried out, with what to do about it.

    The SDK raises it as a ``RequestFailedError`` of the category ``user``.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSpec:
    """Rank, seed and trained layers of a new adapter."""

    rank: int
    seed: int | None = None
    """Seed of the A matrices; None draws one. The B matrices are zero."""
    train_attn: bool = True
    """Whether the attention's projections are adapted."""
    train_mlp: bool = True
    """Whether the MLP's projections are adapted."""


@dataclass(frozen=True, slots=True)
class Datum:
    """One sequence to train on."""

    token_ids: npt.NDArray[np.int64]
    """[N], the model's input."""
    loss_inputs: Mapping[str, npt.NDArray[Any]]
    """Inputs of the loss by name, each [N] or, for distillation, [N, K]; ``target_tokens`` are the
    tokens whose log-probs the loss is of."""


@dataclass(frozen=True, slots=True)
class LossBatch:
    """Sequences of one request, and the loss that they share."""

    data: Sequence[Datum]
    loss_fn: str
    loss_config: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DatumResult:
    """Result of one sequence's forward pass."""

    logprobs: npt.NDArray[np.float32]
    """Log-prob of each target token, shaped as ``target_tokens``."""
    losses: npt.NDArray[np.float32]
    """Each target token's term of the loss, shaped alike."""


@dataclass(frozen=True, slots=True)
class BatchResult:
    """Result of a forward pass, in the order of the request's sequences."""

    data: Sequence[DatumResult]
    metrics: Mapping[str, float]
    """Metrics by ``name:reduction``, as the SDK combines those of several requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamStep:
    """Settings of one AdamW step.

    Raises:
        UserError: AdamW has no step of such settings.
    """

    learning_rate: float = 1e-4
    betas: tuple[float, float] = ADAM_BETAS
    eps: float = ADAM_EPS
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0
    """Largest norm of the whole gradient; 0 for no limit."""

    def __post_init__(self) -> None:
        for name in ("learning_rate", "weight_decay", "grad_clip_norm"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise UserError(f"{name} must be 0 or more, and finite, got {value}")
        if not 0 < self.eps < math.inf:
            raise UserError(f"eps must be above 0, and finite, got {self.eps}")
        for place, beta in enumerate(self.betas, 1):
            if not 0 <= beta < 1:
                raise UserError(f"beta{place} must be in [0, 1), got {beta}")


@dataclass(frozen=True, slots=True)
class TrainedAdapter:
    """Copy of an adapter's present weights."""

    tensors: "Mapping[str, torch.Tensor]"
    """Tensors by PEFT's names, float32."""
    config: Mapping[str, Any]
    """Content of PEFT's ``adapter_config.json``."""

    def not_finite(self) -> str | None:
        """Return the name of a tensor that has NaN or infinity; None if all are finite."""
        return next((k for k, v in self.tensors.items() if not v.isfinite().all()), None)


class TrainingBackend(Protocol):
    """Trains LoRA adapters, *models* to the API, on one resident base model.

    Calls come one at a time and may block. A call that raises :class:`UserError` changes nothing.
    """

    def create(self, model_id: str, spec: LoraSpec) -> None:
        """Add an adapter that changes nothing yet.

        Raises:
            UserError: the base model has no such projections.
        """

    def forward_backward(
        self, model_id: str, batch: LossBatch, *, forward_only: bool
    ) -> BatchResult:
        """Compute a loss, and unless ``forward_only`` add its gradient to the adapter's.

        Raises:
            UserError: an input has a wrong shape or value.
        """

    def optim_step(self, model_id: str, step: AdamStep) -> Mapping[str, float]:
        """Update the adapter with its gradient, clear the gradient, and return metrics.

        Raises:
            UserError: the gradient is not finite; it is cleared.
        """

    def clear_gradients(self, model_id: str) -> None:
        """Forget the gradients since the last step, because a request failed half-way."""

    def save(self, model_id: str, directory: Path) -> None:
        """Write the adapter to a directory as PEFT does, and the optimizer's state beside it."""

    def load(self, model_id: str, directory: Path, *, optimizer: bool) -> None:
        """Replace the adapter's weights by those of a directory of :meth:`save`.

        The optimizer's state is the directory's if ``optimizer``, else that of a new adapter.

        Raises:
            UserError: the directory's adapter is of another shape.
        """

    def adapter(self, model_id: str) -> TrainedAdapter:
        """Return a copy of the adapter for the engines."""

    def remove(self, model_id: str) -> None:
        """Drop an adapter; harmless if there is none."""
