"""Routing replay in every supported mixture of transformers: logits, gradients and refusals."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.models import make_model
from tidegate.errors import ModelError
from tidegate.policies.routing_replay import (
    mixture_layers,
    record_routed_experts,
    replay_routed_experts,
)

ROWS, POSITIONS = 3, 11

DEEPSEEK = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "num_hidden_layers": 3,
}

MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", {"num_local_experts": 6, "num_experts_per_tok": 2}),
    "qwen2-moe": (
        "qwen2_moe",
        {
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 24,
        },
    ),
    "qwen3-moe": ("qwen3_moe", {}),
    "qwen3-moe-some-layers-dense": ("qwen3_moe", {"num_hidden_layers": 3, "mlp_only_layers": [1]}),
    "olmoe": ("olmoe", {"num_experts": 6, "num_experts_per_tok": 3, "num_key_value_heads": 4}),
    "deepseek-v2": ("deepseek_v2", DEEPSEEK | {"n_group": 1, "topk_group": 1}),
    "deepseek-v2-groups": (
        "deepseek_v2",
        DEEPSEEK | {"n_group": 4, "topk_group": 2, "topk_method": "group_limited_greedy"},
    ),
    "deepseek-v3": ("deepseek_v3", DEEPSEEK | {"n_group": 1, "topk_group": 1}),
    "deepseek-v3-groups": ("deepseek_v3", DEEPSEEK | {"n_group": 4, "topk_group": 2}),
    "glm4-moe": (
        "glm4_moe",
        {
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 0,
        },
    ),
    "granitemoe": ("granitemoe", {"num_local_experts": 6, "num_experts_per_tok": 2}),
    "gpt-oss": (
        "gpt_oss",
        {"head_dim": 16, "num_local_experts": 6, "num_experts_per_tok": 2, "tied": False},
    ),
}

mixtures = pytest.mark.parametrize("mixture", MIXTURES)


def make_mixture(mixture: str) -> Any:
    model_type, fields = MIXTURES[mixture]
    return make_model(model_type, **fields)


def make_tokens(rows: int = ROWS, positions: int = POSITIONS) -> Tensor:
    return torch.randint(1, 96, (rows, positions), generator=torch.Generator().manual_seed(1))


def own_routes(model: Any, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logits [R, T, V], and the model's own routed experts [R, T, L, k]."""
    with torch.no_grad(), record_routed_experts(model) as recorder:
        logits = model(tokens).logits
    chosen = recorder.routed_experts()
    return logits, chosen.view(*tokens.shape, *chosen.shape[1:])


def other_routes(model: Any, own: Tensor) -> Tensor:
    """Return random routed experts of the same shape, of all groups."""
    count = mixture_layers(model)[0].num_experts
    scores = torch.rand(*own.shape[:-1], count, generator=torch.Generator().manual_seed(2))
    return scores.topk(own.shape[-1]).indices


@mixtures
def test_replaying_a_models_own_routed_experts_changes_no_logit(mixture: str) -> None:
    model, tokens = make_mixture(mixture), make_tokens()
    logits, own = own_routes(model, tokens)

    with torch.no_grad(), replay_routed_experts(model, own.to(torch.uint8)):
        replayed = model(tokens).logits

    torch.testing.assert_close(replayed, logits, rtol=0, atol=1e-6)


@mixtures
def test_other_routed_experts_are_the_ones_that_compute(mixture: str) -> None:
    model, tokens = make_mixture(mixture), make_tokens()
    logits, own = own_routes(model, tokens)
    other = other_routes(model, own)

    with (
        torch.no_grad(),
        replay_routed_experts(model, other),
        record_routed_experts(model) as recorder,
    ):
        replayed = model(tokens).logits

    assert torch.equal(recorder.routed_experts(), other.flatten(0, 1))
    assert (replayed - logits).abs().max() > 1e-2
    torch.testing.assert_close(own_routes(model, tokens)[0], logits, rtol=0, atol=0)


@pytest.mark.parametrize("mixture", ["deepseek-v2-groups", "deepseek-v3-groups"])
def test_experts_outside_the_groups_that_the_router_prefers_have_their_weight(mixture: str) -> None:
    """Their scores are masked to zero in DeepSeek-V2, which would drop them."""
    model, tokens = make_mixture(mixture), make_tokens()
    _, own = own_routes(model, tokens)
    other = (own + 4) % 8  # 2 groups away
    weights: list[Tensor] = []

    def record_output(module: Any, arguments: Any, output: Any) -> None:
        weights.append(output[1])

    for module in model.modules():
        if type(module).__name__.endswith("TopkRouter"):
            module.register_forward_hook(record_output)
    with torch.no_grad(), replay_routed_experts(model, other):
        model(tokens)

    assert weights
    assert all((weight > 0).all() for weight in weights)


def test_a_layer_of_replayed_experts_equals_the_formula_by_hand() -> None:
    model = make_mixture("qwen3-moe").model.layers[0].mlp
    hidden = torch.randn(1, 7, 64, generator=torch.Generator().manual_seed(3))
    ids = other_routes(make_mixture("qwen3-moe"), torch.empty(7, 1, 2))
    probabilities = F.linear(hidden[0], model.gate.weight).softmax(-1)
    expected = torch.zeros(7, 64)
    for token in range(7):
        weights = probabilities[token, ids[token, 0]]
        for weight, expert in zip(weights / weights.sum(), ids[token, 0].tolist(), strict=True):
            gate, up = F.linear(hidden[0, token], model.experts.gate_up_proj[expert]).chunk(2)
            inner = F.silu(gate) * up
            expected[token] += weight * F.linear(inner, model.experts.down_proj[expert])

    with torch.no_grad(), replay_routed_experts(model, ids):
        output = model(hidden)

    torch.testing.assert_close(output[0], expected, rtol=1e-4, atol=1e-5)


@mixtures
def test_gradients_of_the_router_are_those_of_the_replayed_experts_weights(mixture: str) -> None:
    model, tokens = make_mixture(mixture), make_tokens(1, 5)
    _, own = own_routes(model, tokens)
    other = other_routes(model, own)
    name = next(
        name
        for name, parameter in model.named_parameters()
        if (parameter.dim() == 2 and name.endswith(("gate.weight", "router.weight")))
        or name.endswith("router.layer.weight")
    )
    gate = model.get_parameter(name)
    direction = torch.randn(gate.shape, generator=torch.Generator().manual_seed(4))

    def loss() -> Tensor:
        with replay_routed_experts(model, other):
            logits: Tensor = model(tokens).logits.double()
        return -logits.log_softmax(-1)[0, :-1].gather(-1, tokens[0, 1:, None]).mean()

    torch.autograd.backward(loss())
    assert gate.grad is not None
    slope = float((gate.grad * direction).sum())
    step = 1e-3
    with torch.no_grad():
        gate.add_(direction, alpha=step)
        above = float(loss())
        gate.sub_(direction, alpha=2 * step)
        below = float(loss())

    assert abs(slope) > 1e-4
    assert slope == pytest.approx((above - below) / (2 * step), rel=2e-2)


def test_masked_positions_of_a_padded_batch_are_routed_by_the_model() -> None:
    model, tokens = make_mixture("qwen3-moe"), make_tokens()
    _, own = own_routes(model, tokens)
    mask = torch.arange(POSITIONS) < torch.tensor([POSITIONS, 6, 1])[:, None]
    other = other_routes(model, own)
    other[~mask] = 0  # as padding has, and no routed experts could be

    with (
        torch.no_grad(),
        replay_routed_experts(model, other.to(torch.uint8), mask),
        record_routed_experts(model) as recorder,
    ):
        model(tokens)

    used = recorder.routed_experts().view(other.shape)
    assert torch.equal(used[mask], other[mask])
    assert (used[~mask].sort(-1).values.diff() > 0).all()


def test_layers_run_again_in_the_backward_pass_are_replayed_too() -> None:
    model, tokens = make_mixture("qwen3-moe"), make_tokens()
    other = other_routes(model, own_routes(model, tokens)[1])
    gradients = []
    for is_checkpointed in (False, True):
        model.zero_grad()
        if is_checkpointed:
            model.train()
            new = getattr(model, "activation_checkpointing_enable", None)
            (new or model.gradient_checkpointing_enable)()  # the older name before 5.24
        with replay_routed_experts(model, other):
            model(tokens).logits.square().mean().backward()
        gradients.append(model.model.layers[0].mlp.gate.weight.grad.clone())

    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("routed_experts", "mask", "message"),
    [
        (torch.zeros(3, 11, 5, 2), None, r"\[R, T, 2, k\] or \[N, 2, k\] for the 2 mixture layers"),
        (torch.zeros(2, 2), None, r"got \[2, 2\]"),
        (torch.tensor([[[0, 6], [0, 1]]]), None, "ids from 0 to 6, but .* experts 0 to 5"),
        (torch.tensor([[[1, 1], [0, 1]]]), None, "an expert twice for one token"),
        (torch.tensor([[[0, 1], [0, 1]]]), torch.ones(3), r"mask must be \[1\].*got \[3\]"),
    ],
)
def test_routed_experts_that_cannot_be_this_models_are_refused(
    routed_experts: Tensor, mask: Tensor | None, message: str
) -> None:
    with (
        pytest.raises(ValueError, match=message),
        replay_routed_experts(make_mixture("qwen3-moe"), routed_experts, mask),
    ):
        pass


def test_another_number_of_tokens_or_experts_than_the_model_reads_is_refused() -> None:
    model, tokens = make_mixture("qwen3-moe"), make_tokens()
    _, own = own_routes(model, tokens)
    for wrong, message in (
        (own[:, :-1], "has 30 tokens of 2 experts each, but the model reads 33 tokens"),
        (own[..., :1], "of 1 experts each, .* and chooses 2 experts for each"),
    ):
        with pytest.raises(ValueError, match=message), replay_routed_experts(model, wrong):
            model(tokens)
    torch.testing.assert_close(own_routes(model, tokens)[1], own)  # nothing is left replaced


@pytest.mark.parametrize(
    ("model_type", "fields", "message"),
    [
        ("qwen3", {}, "Qwen3ForCausalLM has no mixture-of-experts layers"),
        (
            "llama4_text",
            {"num_local_experts": 4, "intermediate_size_mlp": 32, "head_dim": 16},
            "Llama4ForCausalLM can't report routed experts: Llama4TextExperts is not called with",
        ),
    ],
)
def test_models_whose_routed_experts_cannot_be_seen_are_refused_by_name(
    model_type: str, fields: dict[str, Any], message: str
) -> None:
    model = make_model(model_type, **fields)
    with pytest.raises(ModelError, match=message), record_routed_experts(model):
        pass


def test_a_router_that_chooses_without_topk_is_noticed_when_it_runs() -> None:
    model, tokens = make_mixture("qwen3-moe"), make_tokens()
    _, own = own_routes(model, tokens)
    gate = model.model.layers[1].mlp.gate

    def choose_by_sort(hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = F.linear(hidden.reshape(-1, 64), gate.weight)
        weights, ids = logits.softmax(-1).sort(-1, descending=True)
        return logits, weights[:, :2], ids[:, :2]

    gate.forward = choose_by_sort
    with (
        pytest.raises(ModelError, match="Qwen3MoeSparseMoeBlock did not use the given"),
        replay_routed_experts(model, other_routes(model, own)),
    ):
        model(tokens)
