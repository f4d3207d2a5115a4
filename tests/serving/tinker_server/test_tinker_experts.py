"""Experts that a mixture routed each position to, in the Tinker server's JSON answers."""

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import tidegate
from tests.models import make_model_directory
from tests.serving.tinker_server.tenant_client import Tenant

pytest.importorskip("tinker", reason="make test-tinker installs the SDK")

pytestmark = pytest.mark.wire

PROMPT = [20, 21, 22, 23]
TOKENS = 8


def sample(tenant: Tenant, sampler: str, seq_id: int = 0, **fields: Any) -> dict[str, Any]:
    params = {"max_tokens": TOKENS}
    future = tenant.sample(sampler, seq_id, tokens=PROMPT, sampling_params=params, **fields)
    return tenant.result(future)


def test_samples_of_a_mixture_have_the_experts_that_transformers_computes(tmp_path: Path) -> None:
    model = make_model_directory(tmp_path / "moe", "qwen3_moe")
    with (
        tidegate.tinker_server(model=model, engines=1) as server,
        Tenant(server.url, "tml-anybody") as tenant,
    ):
        sampler = tenant.new_sampler(model)
        answer = sample(tenant, sampler, num_samples=2, include_routed_experts=True)
        plain = sample(tenant, sampler, seq_id=1)
        model_id = tenant.new_model(model)  # a mixture's adapters are served, too
        tenant.result(tenant.forward_backward(model_id, 1, [21, 22, 23, 24]).json())
        step = {"model_id": model_id, "seq_id": 2, "adam_params": {"learning_rate": 0.1}}
        tenant.result(tenant.post("optim_step", **step))
        save = {"model_id": model_id, "seq_id": 3, "sampling_session_seq_id": 7}
        saved = tenant.result(tenant.post("save_weights_for_sampler", **save))
        trained = sample(tenant, saved["sampling_session_id"], include_routed_experts=True)
    assert plain["sequences"][0]["routed_experts"] is None
    reference: Any = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    chosen = reference.config.num_experts_per_tok
    for sequence in answer["sequences"]:
        experts = np.load(io.BytesIO(base64.b64decode(sequence["routed_experts"])))
        everything = torch.tensor([PROMPT + sequence["tokens"][:-1]])
        with torch.no_grad():
            routers = reference(everything, output_router_logits=True).router_logits
        expected = torch.stack([each.topk(chosen).indices for each in routers], dim=1)
        assert experts.shape == (len(PROMPT) + TOKENS - 1, len(routers), chosen)
        assert np.array_equal(np.sort(experts), np.sort(expected.numpy()))
    assert trained["sequences"][0]["routed_experts"] is not None


def test_a_dense_models_experts_are_refused(tenant: Tenant, model: Path) -> None:
    answer = sample(tenant, tenant.new_sampler(model), include_routed_experts=True)
    assert answer["category"] == "user"
    assert "no mixture-of-experts layers" in answer["error"]
