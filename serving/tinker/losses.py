r"""Loss functions of the Tinker API, token by token.

A request's loss is the sum over its tokens: no mean, no length normalisation. With the policy's
log-prob :math:`\log p`, the behaviour policy's :math:`\log q` (``logprobs``), the ratio
:math:`r = p / q`, the advantage A and the clip thresholds l and h:

===================  ==========================================  ==============================
``cross_entropy``    :math:`-w \log p`                           ``weights`` w, 1 by default
``importance_sampling``  :math:`-r A`                            ``logprobs``, ``advantages``
``ppo``              :math:`-\min(r A, clip(r, l, h) A)`         the same; l = 0.8, h = 1.2
``cispo``            :math:`-sg(clip(r, l, h)) A \log p`         the same
===================  ==========================================  ==============================

PPO: Schulman et al. 2017, arXiv:1707.06347; CISPO: MiniMax-M1, arXiv:2506.13585, where ``sg`` stops
the gradient. :mod:`peft_training` calls this module; shapes are [n] or [n, K].
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tidegate.serving.tinker.training import UserError

if TYPE_CHECKING:
    import torch

    TokenLoss = Callable[
        [torch.Tensor, Mapping[str, torch.Tensor], Mapping[str, float]], torch.Tensor
    ]

CLIP_LOW, CLIP_HIGH = 0.8, 1.2
"""Default ``clip_low_threshold`` and ``clip_high_threshold``: bounds of the ratio itself."""

TARGETS = "target_tokens"
"""Loss input of every function: the tokens whose log-probs it is computed from."""

_CLIP_FIELDS = frozenset({"clip_low_threshold", "clip_high_threshold"})
_POLICY_INPUTS = frozenset({TARGETS, "logprobs", "advantages"})


@dataclass(frozen=True, slots=True)
class LossFunction:
    """A loss, and what a request must give for it."""

    token_losses: "TokenLoss"
    required: frozenset[str]
    """Loss inputs that each sequence needs."""
    optional: frozenset[str] = frozenset()
    """Loss inputs that a sequence may have."""
    config_fields: frozenset[str] = frozenset()
    """Fields of ``loss_fn_config``."""


def _cross_entropy(
    logprobs: "torch.Tensor",
    inputs: "Mapping[str, torch.Tensor]",
    config: Mapping[str, float],
) -> "torch.Tensor":
    weights = inputs.get("weights")
    return -logprobs if weights is None else -weights * logprobs


def _importance_sampling(
    logprobs: "torch.Tensor",
    inputs: "Mapping[str, torch.Tensor]",
    config: Mapping[str, float],
) -> "torch.Tensor":
    return -_ratio(logprobs, inputs) * inputs["advantages"]


def _ppo(
    logprobs: "torch.Tensor",
    inputs: "Mapping[str, torch.Tensor]",
    config: Mapping[str, float],
) -> "torch.Tensor":
    ratio, advantages = _ratio(logprobs, inputs), inputs["advantages"]
    return -(ratio * advantages).minimum(_clipped(ratio, config) * advantages)


def _cispo(
    logprobs: "torch.Tensor",
    inputs: "Mapping[str, torch.Tensor]",
    config: Mapping[str, float],
) -> "torch.Tensor":
    weight = _clipped(_ratio(logprobs, inputs), config).detach()
    return -weight * inputs["advantages"] * logprobs


def _ratio(logprobs: "torch.Tensor", inputs: "Mapping[str, torch.Tensor]") -> "torch.Tensor":
    return (logprobs - inputs["logprobs"]).exp()


def _clipped(ratio: "torch.Tensor", config: Mapping[str, float]) -> "torch.Tensor":
    low = config.get("clip_low_threshold", CLIP_LOW)
    return ratio.clamp(low, config.get("clip_high_threshold", CLIP_HIGH))


LOSSES: Mapping[str, LossFunction] = {
    "cross_entropy": LossFunction(_cross_entropy, frozenset({TARGETS}), frozenset({"weights"})),
    "importance_sampling": LossFunction(_importance_sampling, _POLICY_INPUTS),
    "ppo": LossFunction(_ppo, _POLICY_INPUTS, config_fields=_CLIP_FIELDS),
    "cispo": LossFunction(_cispo, _POLICY_INPUTS, config_fields=_CLIP_FIELDS),
}

USE_INSTEAD: Mapping[str, str] = {
    "stable_reinforce": "ppo",  # its formula is not published
    "gspo": "ppo",
    "dro": "importance_sampling",
    "custom": "forward_backward_custom with a Python function, which the SDK runs on the client",
}
"""Losses of the API that are not served, and what comes nearest."""


def loss_function(name: str) -> LossFunction:
    """Return a loss by its name.

    Raises:
        UserError: there is none of this name.
    """
    found = LOSSES.get(name)
    if found is None:
        instead = USE_INSTEAD.get(name)
        hint = f"use {instead}" if instead else f"use one of {', '.join(LOSSES)}"
        raise UserError(f"loss_fn={name!r} is not served here: {hint}")
    return found
