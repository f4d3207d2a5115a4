"""Routing replay (R3) for mixtures of ``transformers``: records routed experts, and replays them.

A mixture's routers choose k experts per token. Even with equal weights, rounding makes a trainer
choose other experts than the engine did, for about one in ten pairs of token and layer; log-probs
then differ by much more than rounding. Trainers call :func:`replay_routed_experts` around their
forward pass; the engine's transformers fallback, the audit and measurements call
:func:`record_routed_experts`.

Replay replaces a router's ``topk`` with the given ids. Scores, softmax or sigmoid, normalisation
and scaling stay the model's own, computed from its present weights, so gradients reach the router
through the weights of the replayed experts.

Source: Ma et al. 2025, "Stabilizing MoE Reinforcement Learning by Aligning Training and Inference
Routers", arXiv:2510.11370.

Letters in shapes: R rows, T positions, N tokens of a forward pass in the model's order (R * T for a
padded batch), L mixture layers, E experts, k experts per token.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tidegate.errors import ModelError

OnChoice = Callable[[int, Tensor, Tensor], None]
"""Called when a router chooses: with the layer's number, its scores [N, E], and the replayed ids
[N, k]. Scores are probabilities, logits or biased scores, whichever the model ranks."""

EXPERT_ID_ARGUMENTS = ("top_k_index", "router_indices")
"""Names that ``transformers``' expert modules give their argument of chosen ids [N, k]."""

SUPPORTED_MIXTURES = (
    "Mixtral, Qwen2-MoE, Qwen3-MoE, OLMoE, DeepSeek-V2 and V3, GLM-4-MoE, GraniteMoE and gpt-oss"
)
"""Mixtures that tests replay. Others work if their expert modules take the chosen ids, and their
routers choose them by ``topk``; both are checked."""


@dataclass(frozen=True, slots=True)
class MixtureLayer:
    """Mixture-of-experts layer of a ``transformers`` model."""

    block: nn.Module
    """Module that runs the router, then the experts."""
    experts: nn.Module
    """Module that computes the chosen experts."""
    num_experts: int
    num_groups: int
    """Groups of experts, of which the router chooses some before it chooses experts in them; 1
    without groups."""


class RoutedExpertsRecorder:
    """Experts that a model's routers chose in its last forward pass."""

    def __init__(self, layers: Sequence[MixtureLayer]) -> None:
        self._chosen: list[Tensor | None] = [None] * len(layers)

    def routed_experts(self) -> Tensor:
        """Return the chosen ids [N, L, k], int64, in the order of the model's layers.

        Raises:
            ModelError: a mixture layer has not run.
        """
        chosen = [ids for ids in self._chosen if ids is not None]
        if len(chosen) < len(self._chosen):
            raise ModelError(
                f"{len(self._chosen) - len(chosen)} of {len(self._chosen)} mixture layers have "
                f"chosen no experts; run a forward pass of the whole model first"
            )
        return torch.stack(chosen, 1)

    def _record(self, number: int) -> Callable[[Tensor], None]:
        def note(ids: Tensor) -> None:
            self._chosen[number] = ids.detach()

        return note


def is_mixture(model: nn.Module) -> bool:
    """Return whether a model has mixture layers, be their experts recordable or not."""
    return any(isinstance(getattr(b, "experts", None), nn.Module) for b in model.modules())


def mixture_layers(model: nn.Module) -> list[MixtureLayer]:
    """Return a model's mixture layers whose routed experts can be recorded, in order.

    Raises:
        ModelError: the model has no mixture layers, or no module of a layer is called with the
            chosen ids, so they cannot be recorded.
    """
    layers = [
        _mixture_layer(model, block, experts)
        for block in model.modules()
        if isinstance(experts := getattr(block, "experts", None), nn.Module)
    ]
    if not layers:
        raise ModelError(no_mixture(type(model).__name__))
    return layers


def no_mixture(architecture: str) -> str:
    """Return why routed experts of a model without mixture layers are refused."""
    return (
        f"{architecture} has no mixture-of-experts layers, so no experts are routed to; leave "
        f"routed_experts out"
    )


@contextmanager
def record_routed_experts(model: nn.Module) -> Iterator[RoutedExpertsRecorder]:
    """Record the experts that a ``transformers`` mixture chooses in forward passes of this context.

    Raises:
        ModelError: as for :func:`mixture_layers`.
    """
    layers = mixture_layers(model)
    recorder = RoutedExpertsRecorder(layers)
    with ExitStack() as hooks:
        for number, layer in enumerate(layers):
            hooks.enter_context(_on_chosen(layer, recorder._record(number)))
        yield recorder


@contextmanager
def replay_routed_experts(
    model: nn.Module,
    routed_experts: Tensor,
    mask: Tensor | None = None,
    *,
    on_choice: OnChoice | None = None,
) -> Iterator[None]:
    """Run forward passes of a ``transformers`` mixture with given experts instead of its choices.

        with tidegate.replay_routed_experts(model, routed_experts):
            logits = model(token_ids).logits

    Every forward pass in the context must have as many tokens as ``routed_experts`` has. With
    gradient checkpointing, call ``backward`` inside the context too, because it runs layers again.

    Args:
        model: mixture of ``transformers``, possibly wrapped (DDP, FSDP, PEFT).
        routed_experts: [R, T, L, k] or [N, L, k], ids of any integer type: for each token that the
            model reads, the k experts that each of its L mixture layers chose, layers in order.
        mask: [R, T] or [N], bool: tokens whose routed experts are known. At others, for example
            padding, the model chooses. None: all are known.
        on_choice: called with each router's scores, which the audit compares with the given ids.

    Raises:
        ModelError: as for :func:`mixture_layers`; or a forward pass used other experts, because
            this model's router does not choose them by ``topk``.
        ValueError: the shape fits neither the model nor the tokens that it reads, an id is no
            expert of the layer, or a token has an expert twice.
    """
    layers = mixture_layers(model)
    ids, known = _flattened(routed_experts, mask, layers, type(model).__name__)
    with ExitStack() as hooks:
        for number, layer in enumerate(layers):
            observe = None if on_choice is None else partial(on_choice, number)
            hooks.enter_context(_replayed(layer, ids[:, number], known, observe))
        yield


# ---------------------------------------------------------------- layers


def _mixture_layer(model: nn.Module, block: nn.Module, experts: nn.Module) -> MixtureLayer:
    if _id_argument(experts) is None:
        raise ModelError(
            f"{type(model).__name__} can't report routed experts: {type(experts).__name__} is not "
            f"called with the ids that its router chose. Supported are {SUPPORTED_MIXTURES}, and "
            f"others whose experts take top_k_index"
        )
    count = getattr(experts, "total_experts", None) or getattr(experts, "num_experts", None)
    if not isinstance(count, int):
        raise ModelError(
            f"{type(model).__name__} can't report routed experts: {type(experts).__name__} does "
            f"not say in num_experts how many it has"
        )
    groups = [getattr(part, "num_group", None) for part in block.modules()]
    return MixtureLayer(block, experts, count, next(filter(None, groups), 1))


def _id_argument(experts: nn.Module) -> str | None:
    """Return the name of the argument of chosen ids, the second one; None if there is none."""
    names = list(inspect.signature(experts.forward).parameters)
    return names[1] if len(names) > 1 and names[1] in EXPERT_ID_ARGUMENTS else None


@contextmanager
def _on_chosen(layer: MixtureLayer, take: Callable[[Tensor], None]) -> Iterator[None]:
    """Call ``take`` with the ids [N, k] whenever the layer's experts are called."""
    name = _id_argument(layer.experts)

    def hook(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        take(named[name] if name in named else arguments[1])

    handle = layer.experts.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


# ---------------------------------------------------------------- replay


def _flattened(
    routed_experts: Tensor, mask: Tensor | None, layers: Sequence[MixtureLayer], model: str
) -> tuple[Tensor, Tensor | None]:
    """Check the ids; return them as [N, L, k], int64, and the mask as [N].

    Raises:
        ValueError: as for :func:`replay_routed_experts`.
    """
    shape = tuple(routed_experts.shape)
    if routed_experts.dim() not in (3, 4) or shape[-2] != len(layers):
        raise ValueError(
            f"routed_experts must be [R, T, {len(layers)}, k] or [N, {len(layers)}, k] for the "
            f"{len(layers)} mixture layers of {model}, got {list(shape)}"
        )
    if mask is not None and tuple(mask.shape) != shape[:-2]:
        raise ValueError(
            f"mask must be {list(shape[:-2])}, one value per token of routed_experts "
            f"{list(shape)}, got {list(mask.shape)}"
        )
    ids = routed_experts.reshape(-1, *shape[-2:]).long()
    known = None if mask is None else mask.reshape(-1).bool()
    checked = ids if known is None else ids[known.to(ids.device)]
    fewest = min(layer.num_experts for layer in layers)
    if checked.numel() and not (int(checked.min()) >= 0 and int(checked.max()) < fewest):
        raise ValueError(
            f"routed_experts has ids from {int(checked.min())} to {int(checked.max())}, but "
            f"{model} has experts 0 to {fewest - 1}; were they recorded from another model?"
        )
    ordered = checked.sort(-1).values
    if (ordered[..., 1:] == ordered[..., :-1]).any():
        raise ValueError(
            "routed_experts has an expert twice for one token and layer; mask the positions whose "
            "experts are unknown, such as padding"
        )
    return ids, known


@contextmanager
def _replayed(
    layer: MixtureLayer,
    ids: Tensor,
    known: Tensor | None,
    observe: Callable[[Tensor, Tensor], None] | None,
) -> Iterator[None]:
    """Make a layer's router choose ``ids`` [N, k] for ``known`` tokens [N], and check the experts
    that were used."""
    choice = _ReplacedChoice(layer, ids, known, observe)
    active: list[ExitStack] = []

    def before(module: nn.Module, arguments: tuple[Any, ...]) -> None:
        with ExitStack() as stack:
            stack.enter_context(choice)
            active.append(stack.pop_all())

    def after(module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        if active:  # empty if another hook has failed before ``before``
            active.pop().close()

    handles = [
        layer.block.register_forward_pre_hook(before),
        layer.block.register_forward_hook(after, always_call=True),
    ]
    try:
        with _on_chosen(layer, choice.check):
            yield
    finally:
        for handle in handles:
            handle.remove()


class _ReplacedChoice(TorchFunctionMode):
    """Replaces the result of ``topk`` over a layer's experts by given ids."""

    def __init__(
        self,
        layer: MixtureLayer,
        ids: Tensor,
        known: Tensor | None,
        observe: Callable[[Tensor, Tensor], None] | None,
    ) -> None:
        super().__init__()
        self._observe = observe
        self._layer = layer
        self._ids = ids
        self._known = known

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Any = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        named = kwargs or {}
        if func not in (torch.topk, Tensor.topk):
            return func(*args, **named)
        scores: Tensor = args[0] if args else named["input"]
        layer = self._layer
        if scores.shape[-1] == layer.num_experts and scores.dim() == 2:
            own = func(*args, **named)
            ids = self._replace(own.indices)
            if self._observe is not None:
                self._observe(scores, ids)
            return torch.return_types.topk((scores.gather(-1, ids), ids))
        if layer.num_groups > 1 and scores.shape == (len(self._ids), layer.num_groups):
            # Experts outside the chosen groups have a score of zero in some models, so the groups
            # of the replayed experts must be among the chosen ones.
            return func(self._with_groups_first(scores), *args[1:], **_without_input(named))
        return func(*args, **named)

    def check(self, used: Tensor) -> None:
        """Check the ids [N, k] that the experts are called with.

        Raises:
            ModelError: they are not the replayed ones.
        """
        if not torch.equal(self._replace(used), used):
            raise ModelError(
                f"{type(self._layer.block).__name__} did not use the given routed experts, because "
                f"its router does not choose them by one topk over {self._layer.num_experts} "
                f"scores. Supported are {SUPPORTED_MIXTURES}"
            )

    def _replace(self, own: Tensor) -> Tensor:
        """Return the replayed ids [N, k], and the router's ``own`` where none are known."""
        if own.shape != self._ids.shape:
            tokens, per_token = self._ids.shape
            raise ValueError(
                f"routed_experts has {tokens} tokens of {per_token} experts each, but the model "
                f"reads {own.shape[0]} tokens, and chooses {own.shape[1]} experts for each"
            )
        ids = self._ids.to(own.device)
        if self._known is None:
            return ids
        return torch.where(self._known.to(own.device)[:, None], ids, own)

    def _with_groups_first(self, group_scores: Tensor) -> Tensor:
        """Raise the scores [N, groups] of the groups of known replayed experts above all others."""
        group_experts = self._layer.num_experts // self._layer.num_groups
        groups = self._ids.to(group_scores.device) // group_experts
        replayed = torch.zeros_like(group_scores, dtype=torch.bool)
        replayed.scatter_(1, groups.clamp(0, self._layer.num_groups - 1), True)
        if self._known is not None:
            replayed &= self._known.to(group_scores.device)[:, None]
        return group_scores.masked_fill(replayed, float("inf"))


def _without_input(named: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in named.items() if name != "input"}
