"""Engines that serve in bytes what a trainer publishes in full: audited, measured, and said."""

import json
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import transformers

import tidegate
from tests.models import make_model_directory
from tests.mortal_trainer import two_turns
from tests.orchestrator.trainer.runs import SMALL, Weights
from tidegate.errors import ConfigError, EngineStartFailed
from tidegate.observability.audit.audit import audit_run
from tidegate.policies.diagnostics import measure_mismatch

pytestmark = pytest.mark.wire


@pytest.mark.parametrize("quantization", ["int8", "fp8"])
async def test_tokens_of_rounded_weights_are_audited_by_rounded_weights_and_by_no_others(
    tmp_path: Path, quantization: Literal["int8", "fp8"]
) -> None:
    model, run = make_model_directory(tmp_path / "model", tied=False), tmp_path / "run"
    weights = Weights(model)
    policy: Any = transformers.AutoModelForCausalLM.from_pretrained(model)
    mismatches = []
    async with tidegate.serve(
        model=model, **SMALL, quantization=quantization, max_staleness=1, run_directory=run
    ) as rollouts:
        async for batch in rollouts.batches(range(8), episode=two_turns):
            policy.load_state_dict(weights.state)  # what the newest tokens were published as
            mismatches.append(mismatch(policy, batch, rollouts.version))
            await rollouts.publish(weights.step())
        [engine] = rollouts.statistics().engines
        assert engine.quantization == quantization
    report = audit_run(run)
    assert report.agrees, report.lines()
    assert report.versions > 1
    measured = max(mismatches)
    assert 1e-6 < measured < 0.1  # rounding is off-policy, and not by much

    settings = json.loads((run / "run.json").read_bytes())
    settings["settings"]["quantization"] = None
    (run / "run.json").write_text(json.dumps(settings))
    assert not audit_run(run).agrees


async def test_tokens_of_two_ranks_that_round_are_audited_after_whole_sets_and_parts(
    tmp_path: Path,
) -> None:
    model, run = make_model_directory(tmp_path / "model", tied=False), tmp_path / "run"
    weights = Weights(model)
    async with tidegate.serve(
        model=model,
        **SMALL,
        quantization="int8",
        tensor_parallel_size=2,
        weight_deltas=True,
        max_staleness=1,
        run_directory=run,
    ) as rollouts:
        async for batch in rollouts.batches(range(8), episode=two_turns):
            state = weights.step()
            if rollouts.version % 2:
                await rollouts.publish(state)
            else:  # all of them are cut, some by outputs and some by inputs
                part = {name: tensor for name, tensor in state.items() if "_proj" in name}
                await rollouts.publish(part, batches=[batch], partial=True)
        [engine] = rollouts.statistics().engines
        assert (engine.quantization, engine.tensor_parallel_size) == ("int8", 2)
    report = audit_run(run)
    assert report.agrees, report.lines()
    assert report.versions > 1


def mismatch(policy: Any, batch: tidegate.Batch, version: int) -> float:
    """The KL between what the trainer's own weights say, and what was sampled from, of the newest
    tokens: those of the very weights that the trainer has."""
    with torch.no_grad():
        logits = policy(input_ids=batch.token_ids, attention_mask=batch.attention_mask).logits
    logprobs = logits[:, :-1].log_softmax(-1).gather(-1, batch.token_ids[:, 1:, None]).squeeze(-1)
    newest = (batch.loss_mask & (batch.weight_versions == version))[:, 1:]
    return measure_mismatch(logprobs - batch.logprobs[:, 1:], newest).k3


def test_rounding_is_refused_where_it_can_not_be(tmp_path: Path) -> None:
    own = make_model_directory(tmp_path / "own")
    with pytest.raises(ConfigError, match="products depend on the batch"):
        tidegate.serve_sync(model=own, quantization="fp8", deterministic=True)
    with (
        pytest.raises(EngineStartFailed, match="transformers computes in full precision"),
        tidegate.serve_sync(
            model=make_model_directory(tmp_path / "gpt2", "gpt2"), **SMALL, quantization="int8"
        ),
    ):
        pass
