r"""Loss functions of the Tinker API, token by token.

A request's loss is the sum over its tokens: no mean, no length normalisation. With the policy's
log-prob :math:`\log p`, the behaviour policy's :math:`\log q` (``logprobs``), the ratio
:math:`r = p / q`, the advantage A and the clip thresholds l and h (of the ratio itself):

===================  ==========================================  ==============================
``cross_entropy``    :math:`-w \log p`                           ``weights`` w, 1 by default
``importance_sampling``  :math:`-r A`                            ``logprobs``, ``advantages``
``ppo``              :math:`-\min(r A, clip(r, l, h) A)`         the same; l = 0.8, h = 1.2
``cispo``            :math:`-sg(clip(r, l, h)) A \log p`         the same
``gspo``             :math:`-\min(s A, clip(s, l, h) A)`         and ``sequence_ratio_mask``
``dro``              :math:`-(A \log p - b/2 (\log p/q)^2)`      ``logprobs``, ``advantages``
===================  ==========================================  ==============================

PPO: Schulman et al. 2017, arXiv:1707.06347; CISPO: MiniMax-M1, arXiv:2506.13585, where ``sg`` stops
the gradient. GSPO-token: Zheng et al. 2025, arXiv:2507.18071, section 4.3: s has the value of the
geometric mean of r over the tokens that the mask marks, and the gradient of the token's own
:math:`\log p`. The SDK's documents give no default for its thresholds, nor for the ``beta`` b of
``dro``, so a request must have them. Shapes are [n], or [n, K] for losses without a mask. Ratios
are clamped as those of ``policies/objectives.py``, whose :func:`clamped_ratio` computes them: an
infinite one would make the gradient NaN.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tidegate.policies.objectives import clamped_ratio
from tidegate.serving.tinker.training import UserError

if TYPE_CHECKING:
    import torch

CLIP_LOW, CLIP_HIGH = 0.8, 1.2
"""Default ``clip_low_threshold`` and ``clip_high_threshold``: bounds of the ratio itself."""

TARGETS = "target_tokens"
"""Loss input of every function: the tokens whose log-probs it is computed from."""

RATIO_MASK = "sequence_ratio_mask"
"""Loss input of ``gspo``: not 0 at the tokens whose ratios are averaged."""

_CLIP_FIELDS = frozenset({"clip_low_threshold", "clip_high_threshold"})
_POLICY_INPUTS = frozenset({TARGETS, "logprobs", "advantages"})


@dataclass(frozen=True, slots=True)
class LossFunction:
    """A loss function, and the input tensors that a request must have for it."""

    token_losses: "Callable[[LossTerms], torch.Tensor]"
    """Returns the loss of each target."""
    required: frozenset[str]
    """Loss inputs that each sequence needs."""
    optional: frozenset[str] = frozenset()
    """Loss inputs that a sequence may have."""
    config_fields: frozenset[str] = frozenset()
    """Fields of ``loss_fn_config``."""
    required_config: frozenset[str] = frozenset()
    """Fields of ``loss_fn_config`` without a default."""


@dataclass(frozen=True, slots=True)
class LossTerms:
    """Log-probs of one sequence's targets, and what a request has beside them."""

    logprobs: "torch.Tensor"
    inputs: "Mapping[str, torch.Tensor]"
    config: Mapping[str, float]

    @property
    def advantages(self) -> "torch.Tensor":
        """Advantage of each token."""
        return self.inputs["advantages"]

    @property
    def ratio(self) -> "torch.Tensor":
        """Ratio of the policy's to the behaviour policy's probability of each token."""
        return clamped_ratio(self.logprobs - self.inputs["logprobs"])

    def clipped(self, ratio: "torch.Tensor") -> "torch.Tensor":
        """Return a ratio within the request's thresholds."""
        low = self.config.get("clip_low_threshold", CLIP_LOW)
        return ratio.clamp(low, self.config.get("clip_high_threshold", CLIP_HIGH))


def _cross_entropy(terms: LossTerms) -> "torch.Tensor":
    weights = terms.inputs.get("weights")
    return -terms.logprobs if weights is None else -weights * terms.logprobs


def _importance_sampling(terms: LossTerms) -> "torch.Tensor":
    return -terms.ratio * terms.advantages


def _clipped_objective(terms: LossTerms, ratio: "torch.Tensor") -> "torch.Tensor":
    return -(ratio * terms.advantages).minimum(terms.clipped(ratio) * terms.advantages)


def _ppo(terms: LossTerms) -> "torch.Tensor":
    return _clipped_objective(terms, terms.ratio)


def _cispo(terms: LossTerms) -> "torch.Tensor":
    return -terms.clipped(terms.ratio).detach() * terms.advantages * terms.logprobs


def _gspo(terms: LossTerms) -> "torch.Tensor":
    logprobs, marked = terms.logprobs, terms.inputs[RATIO_MASK] != 0
    mean = (logprobs.detach() - terms.inputs["logprobs"])[marked].mean()
    return _clipped_objective(terms, clamped_ratio(mean + logprobs - logprobs.detach()))


def _dro(terms: LossTerms) -> "torch.Tensor":
    penalty = 0.5 * terms.config["beta"] * (terms.logprobs - terms.inputs["logprobs"]) ** 2
    return penalty - terms.advantages * terms.logprobs


LOSSES: Mapping[str, LossFunction] = {
    "cross_entropy": LossFunction(_cross_entropy, frozenset({TARGETS}), frozenset({"weights"})),
    "importance_sampling": LossFunction(_importance_sampling, _POLICY_INPUTS),
    "ppo": LossFunction(_ppo, _POLICY_INPUTS, config_fields=_CLIP_FIELDS),
    "cispo": LossFunction(_cispo, _POLICY_INPUTS, config_fields=_CLIP_FIELDS),
    "gspo": LossFunction(
        _gspo,
        _POLICY_INPUTS | {RATIO_MASK},
        config_fields=_CLIP_FIELDS,
        required_config=_CLIP_FIELDS,
    ),
    "dro": LossFunction(
        _dro,
        _POLICY_INPUTS,
        config_fields=frozenset({"beta"}),
        required_config=frozenset({"beta"}),
    ),
}

USE_INSTEAD: Mapping[str, str] = {
    "stable_reinforce": "ppo, because its formula is not published, or start the server with "
    "--stable-reinforce ppo (or cispo, importance_sampling), which computes that loss instead",
    "custom": "forward_backward_custom with a Python function, which the SDK runs on the client",
}
"""Losses of the API that are not served, and the closest substitute of each."""


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
