"""The reference backend: losses by their formulas, gradients, optimizer and checkpoints."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.models import make_model_directory
from tidegate.serving.tinker.losses import LOSSES, LossTerms
from tidegate.serving.tinker.peft_training import PeftTraining, micro_batches
from tidegate.serving.tinker.training import AdamStep, Datum, LoraSpec, LossBatch, UserError

IDS = np.arange(20, 30)
ZEROS = np.zeros(9)
STEP = AdamStep(learning_rate=0.05)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_directory(tmp_path_factory.mktemp("trained") / "model", "qwen3")


@pytest.fixture(scope="module")
def backend(directory: Path) -> PeftTraining:
    backend = PeftTraining(directory)
    for name, seed in (("one", 1), ("two", 2)):
        backend.create(name, LoraSpec(rank=4, seed=seed))
    return backend


def datum(length: int = 9, **inputs: Any) -> Datum:
    given = {name: np.asarray(value, np.float32) for name, value in inputs.items()}
    return Datum(IDS[:length], {"target_tokens": IDS[1 : length + 1], **given})


def batch(*data: Datum, loss_fn: str = "cross_entropy", **config: float) -> LossBatch:
    return LossBatch(data or (datum(),), loss_fn, config)


def loss_of(backend: PeftTraining, model_id: str, given: LossBatch | None = None) -> float:
    result = backend.forward_backward(model_id, given or batch(), forward_only=True)
    return result.metrics["loss:sum"]


def train(backend: PeftTraining, model_id: str, steps: int = 1) -> None:
    for _ in range(steps):
        backend.forward_backward(model_id, batch(), forward_only=False)
        backend.optim_step(model_id, STEP)


# ---------------------------------------------------------------- losses

P, Q, A = np.log(0.6), np.log(0.4), 2.0
"""Log-probs of the policy and of the behaviour policy, whose ratio is 1.5; an advantage."""


@pytest.mark.parametrize(
    ("name", "inputs", "config", "loss", "slope"),
    [
        ("cross_entropy", {}, {}, -P, -1.0),
        ("cross_entropy", {"weights": 0.5}, {}, -0.5 * P, -0.5),
        ("importance_sampling", {"logprobs": Q, "advantages": A}, {}, -3.0, -3.0),
        ("ppo", {"logprobs": Q, "advantages": A}, {}, -2.4, 0.0),  # clipped at 1.2
        ("ppo", {"logprobs": Q, "advantages": -A}, {}, 3.0, 3.0),  # the worse of both
        ("ppo", {"logprobs": Q, "advantages": A}, {"clip_high_threshold": 2.0}, -3.0, -3.0),
        ("cispo", {"logprobs": Q, "advantages": A}, {}, -2.4 * P, -2.4),
        ("cispo", {"logprobs": Q, "advantages": A}, {"clip_high_threshold": 2.0}, -3 * P, -3.0),
        ("dro", {"logprobs": Q, "advantages": A}, {"beta": 0.0}, -A * P, -A),
        (
            "dro",
            {"logprobs": Q, "advantages": A},
            {"beta": 0.5},
            0.25 * (P - Q) ** 2 - A * P,
            0.5 * (P - Q) - A,
        ),
    ],
)
def test_a_loss_and_its_slope_are_those_of_its_formula(
    name: str, inputs: Mapping[str, float], config: Mapping[str, float], loss: float, slope: float
) -> None:
    logprobs = torch.tensor([P], requires_grad=True)
    tensors = {key: torch.tensor([value]) for key, value in inputs.items()}
    found = LOSSES[name].token_losses(LossTerms(logprobs, tensors, config))
    assert found.item() == pytest.approx(loss, rel=1e-5)
    (gradient,) = torch.autograd.grad(found.sum(), logprobs)
    assert gradient.item() == pytest.approx(slope, rel=1e-5)


@pytest.mark.parametrize("name", ["importance_sampling", "ppo", "cispo", "gspo", "dro"])
@pytest.mark.parametrize("advantage", [A, -A])
def test_a_token_that_became_much_likelier_has_a_finite_gradient(
    name: str, advantage: float
) -> None:
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    tensors = {
        "logprobs": torch.tensor([-1000.0, -500.0]),
        "advantages": torch.full((2,), advantage),
        "sequence_ratio_mask": torch.ones(2),
    }
    config = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2, "beta": 0.1}
    found = LOSSES[name].token_losses(LossTerms(logprobs, tensors, config))
    (gradient,) = torch.autograd.grad(found.sum(), logprobs)
    assert found.isfinite().all()
    assert gradient.isfinite().all()


@pytest.mark.parametrize(
    ("high", "losses", "slopes"),
    [
        (2.0, [-1.2, 0.6, -1.2], [-1.2, 0.6, -1.2]),
        (1.1, [-1.1, 0.6, -1.1], [0.0, 0.6, 0.0]),  # the whole sequence, where that is the worse
    ],
)
def test_gspo_weighs_each_token_by_the_ratio_of_the_marked_ones(
    high: float, losses: list[float], slopes: list[float]
) -> None:
    ratios = [2.0, 0.72, 50.0]  # the geometric mean of the first two is 1.2
    behaviour = torch.tensor([-3.0, -4.0, -5.0])
    logprobs = (behaviour + torch.tensor(ratios).log()).requires_grad_()
    inputs = {
        "logprobs": behaviour,
        "advantages": torch.tensor([1.0, -0.5, 1.0]),
        "sequence_ratio_mask": torch.tensor([1.0, 1.0, 0.0]),
    }
    config = {"clip_low_threshold": 0.8, "clip_high_threshold": high}
    found = LOSSES["gspo"].token_losses(LossTerms(logprobs, inputs, config))
    assert found.tolist() == pytest.approx(losses, rel=1e-5)
    (gradient,) = torch.autograd.grad(found.sum(), logprobs)
    assert gradient.tolist() == pytest.approx(slopes, rel=1e-5)


# ---------------------------------------------------------------- training


def test_an_adapter_learns_and_its_neighbour_does_not(backend: PeftTraining) -> None:
    before, other = loss_of(backend, "one"), loss_of(backend, "two")
    assert before == pytest.approx(other)  # a new adapter changes nothing
    train(backend, "one", steps=10)
    assert loss_of(backend, "one") < 0.7 * before
    assert loss_of(backend, "two") == other


def test_gradients_of_several_requests_add_up_as_if_they_were_one(directory: Path) -> None:
    backend = PeftTraining(directory)
    parts = [batch(datum(5)), batch(datum(9), datum(3))]
    whole = batch(*(each for part in parts for each in part.data))
    norms = []
    for requests in ([whole], parts):
        backend.create("model", LoraSpec(rank=4, seed=3))
        for request in requests:
            backend.forward_backward("model", request, forward_only=False)
        norms.append(backend.optim_step("model", STEP)["grad_norm"])
        backend.remove("model")
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)


def test_a_forward_pass_and_a_step_leave_no_gradient(backend: PeftTraining) -> None:
    loss_of(backend, "two")
    assert backend.optim_step("two", STEP)["grad_norm"] == 0
    backend.forward_backward("two", batch(), forward_only=False)
    backend.clear_gradients("two")
    assert backend.optim_step("two", STEP)["grad_norm"] == 0


def test_a_gradient_that_is_not_finite_is_discarded_and_the_weights_stay(
    backend: PeftTraining,
) -> None:
    before = loss_of(backend, "one")
    huge = batch(datum(weights=np.full(9, 3e38, np.float32)))
    backend.forward_backward("one", huge, forward_only=False)
    with pytest.raises(UserError, match="the gradient has NaN or infinity, so it was discarded"):
        backend.optim_step("one", STEP)
    assert loss_of(backend, "one") == before
    assert backend.optim_step("one", STEP)["grad_norm"] == 0


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"betas": (0.9, 1.0)}, r"beta2 must be in \[0, 1\), got 1.0"),
        ({"betas": (-0.1, 0.9)}, r"beta1 must be in \[0, 1\), got -0.1"),
        ({"eps": 0.0}, "eps must be above 0, and finite, got 0.0"),
        ({"learning_rate": float("inf")}, "learning_rate must be 0 or more, and finite, got inf"),
        ({"weight_decay": -1.0}, "weight_decay must be 0 or more"),
    ],
)
def test_a_step_that_adamw_does_not_have_is_refused(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(UserError, match=why):
        AdamStep(**settings)


def test_sequences_keep_their_places_and_results_whatever_shares_their_batch(
    backend: PeftTraining,
) -> None:
    data = [datum(length) for length in (9, 2, 7, 1)]
    together = backend.forward_backward("one", batch(*data), forward_only=True)
    for each, alone in zip(together.data, data, strict=True):
        (single,) = backend.forward_backward("one", batch(alone), forward_only=True).data
        assert each.logprobs == pytest.approx(single.logprobs, abs=1e-5)
        assert each.losses == pytest.approx(-single.logprobs, abs=1e-5)


def test_micro_batches_hold_every_sequence_once_and_few_padded_tokens() -> None:
    lengths = [3000, 10, 900, 20, 1024, 1]
    batches = list(micro_batches(lengths))
    assert sorted(place for each in batches for place in each) == list(range(6))
    assert all(len(b) == 1 or len(b) * max(lengths[i] for i in b) <= 2048 for b in batches)
    assert [0] in batches  # longer than a whole batch


def test_several_targets_of_a_position_have_a_log_prob_each(backend: PeftTraining) -> None:
    targets = np.stack([IDS[1:10], IDS[:9]], axis=1)
    several = Datum(IDS[:9], {"target_tokens": targets, "weights": np.ones((9, 2), np.float32)})
    result = backend.forward_backward("one", batch(several), forward_only=True)
    single = backend.forward_backward("one", batch(), forward_only=True)
    assert result.data[0].logprobs.shape == (9, 2)
    assert result.data[0].logprobs[:, 0] == pytest.approx(single.data[0].logprobs, abs=1e-5)


# ---------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("optimizer", [True, False])
def test_a_checkpoint_continues_as_its_model_did_if_the_optimizer_comes_with_it(
    backend: PeftTraining, tmp_path: Path, optimizer: bool
) -> None:
    backend.create("saved", LoraSpec(rank=4, seed=5))
    backend.create("loaded", LoraSpec(rank=4, seed=6))
    train(backend, "saved", steps=3)
    backend.save("saved", tmp_path / "checkpoint")
    backend.load("loaded", tmp_path / "checkpoint", optimizer=optimizer)
    assert loss_of(backend, "loaded") == loss_of(backend, "saved")
    train(backend, "saved")
    train(backend, "loaded")
    assert (loss_of(backend, "loaded") == loss_of(backend, "saved")) is optimizer
    for name in ("saved", "loaded"):
        backend.remove(name)


def test_a_checkpoint_of_another_rank_is_refused(backend: PeftTraining, tmp_path: Path) -> None:
    backend.save("one", tmp_path)
    backend.create("wide", LoraSpec(rank=8))
    with pytest.raises(UserError, match="is of another shape"):
        backend.load("wide", tmp_path, optimizer=True)
    backend.remove("wide")
    backend.remove("wide")  # harmless


def test_an_adapter_is_one_that_engines_and_peft_read(
    backend: PeftTraining, tmp_path: Path
) -> None:
    from peft import LoraConfig

    from tidegate.orchestrator.weight_sync.adapter_files import load_adapter

    adapter = backend.adapter("one")
    loaded = load_adapter(adapter.tensors, adapter.config)
    assert loaded.scale == 8.0  # lora_alpha 32, rank 4
    backend.save("one", tmp_path)
    assert load_adapter(tmp_path).tensors.keys() == loaded.tensors.keys()
    assert LoraConfig.from_pretrained(str(tmp_path)).r == 4


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (batch(loss_fn="stable_reinforce"), "'stable_reinforce' is not served here: use ppo"),
        (batch(loss_fn="dro"), "loss_fn='dro' needs beta in loss_fn_config: there is no default"),
        (
            batch(
                datum(logprobs=ZEROS, advantages=ZEROS, sequence_ratio_mask=ZEROS),
                loss_fn="gspo",
                clip_low_threshold=0.8,
                clip_high_threshold=1.2,
            ),
            r"data\[0\]: sequence_ratio_mask marks no token",
        ),
        (batch(loss_fn="mse"), "use one of cross_entropy, importance_sampling, ppo, cispo"),
        (
            batch(
                datum(logprobs=ZEROS, advantages=ZEROS),
                loss_fn="ppo",
                clip_low_threshold=float("nan"),
            ),
            r"loss_fn_config\['clip_low_threshold'\] must be finite, got nan",
        ),
        (batch(beta=1.0), "'cross_entropy' has no setting 'beta'; its settings are none"),
        (batch(loss_fn="ppo"), r"data\[0\] lacks 'advantages', which 'ppo' needs"),
        (batch(datum(mask=np.ones(9))), r"data\[0\] has 'mask', which 'cross_entropy' does not"),
        (batch(datum(weights=np.ones(8))), r"weights has shape \[8\], and target_tokens \[9\]"),
        (batch(datum(weights=np.full(9, np.nan))), "weights has a value that is NaN or infinite"),
        (batch(replace(datum(), token_ids=IDS[:8])), "has 8 input tokens, so target_tokens must"),
        (batch(replace(datum(), token_ids=IDS[:9] + 70)), r"model_input must be in \[0, 96\)"),
        (batch(Datum(IDS[:0], {"target_tokens": IDS[:0]})), r"data\[0\] has no token"),
    ],
)
def test_a_request_that_cannot_be_computed_is_refused_by_name(
    backend: PeftTraining, given: LossBatch, why: str
) -> None:
    with pytest.raises(UserError, match=why):
        backend.forward_backward("two", given, forward_only=False)
    assert backend.optim_step("two", STEP)["grad_norm"] == 0  # it added nothing


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        (LoraSpec(rank=0), r"rank must be in \[1, 512\], got 0"),
        (LoraSpec(rank=4, train_attn=False, train_mlp=False), "has no projection to train"),
    ],
)
def test_an_adapter_that_engines_cannot_serve_is_refused(
    backend: PeftTraining, spec: LoraSpec, why: str
) -> None:
    with pytest.raises(UserError, match=why):
        backend.create("refused", spec)
