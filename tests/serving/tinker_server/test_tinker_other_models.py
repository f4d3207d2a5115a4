"""Base models that are sampled from beside the trained one, and a loss computed for another."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import tidegate
from tests.models import make_model_directory
from tests.serving.tinker_server.tenant_client import Tenant
from tidegate.errors import ConfigError

pytest.importorskip("tinker", reason="make test-tinker installs the SDK")

pytestmark = pytest.mark.wire

PROMPT = [20, 21, 22, 23]


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_directory(tmp_path_factory.mktemp("judge") / "model", "llama")


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("state")


def serve(model: Path, judge: Path, state: Path) -> tidegate.TinkerServer:
    return tidegate.tinker_server(
        model=model,
        engines=1,
        served_model_name="org/policy",
        sampling_models={"org/judge": judge},
        stable_reinforce="ppo",
        state_directory=state,
    )


@pytest.fixture(scope="module")
def server(model: Path, judge: Path, state: Path) -> Iterator[tidegate.TinkerServer]:
    with serve(model, judge, state) as server:
        yield server


def sampled(tenant: Tenant, sampler: str, seq_id: int = 0, **more: Any) -> dict[str, Any]:
    future = tenant.sample(sampler, seq_id, tokens=PROMPT, prompt_logprobs=True, **more)
    return tenant.result(future)


def logprobs_of(directory: Path) -> list[float]:
    model: Any = AutoModelForCausalLM.from_pretrained(directory)
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT])).logits[0].float()
    found = torch.log_softmax(logits, -1)[range(3), PROMPT[1:]]
    return [float(each) for each in found]


def test_each_base_model_samples_with_its_own_weights_and_only_one_is_trained(
    tenant: Tenant, model: Path, judge: Path
) -> None:
    capabilities = tenant.http.get("get_server_capabilities").json()["supported_models"]
    assert [(m["model_name"], m["trainable"]) for m in capabilities] == [
        ("org/policy", True),
        ("org/judge", False),
    ]
    session = tenant.new_session()
    for number, (name, directory) in enumerate({"org/policy": model, "org/judge": judge}.items()):
        sampler = tenant.new_sampler(name, session, number)
        assert tenant.http.get(f"samplers/{sampler}").json()["base_model"] == name
        result = sampled(tenant, sampler)
        assert result["prompt_logprobs"][1:] == pytest.approx(logprobs_of(directory), abs=1e-4)
        assert len(result["sequences"][0]["tokens"]) == 3
    body = {"session_id": session, "model_seq_id": 0, "lora_config": {"rank": 4}}
    status, why = tenant.refusal("create_model", base_model="org/judge", **body)
    assert (status, "is sampled from only; this server trains adapters of org/policy" in why) == (
        400,
        True,
    )
    status, why = tenant.refusal("create_model", base_model="org/other", **body)
    assert (status, "this server has org/policy, org/judge" in why) == (400, True)


def test_a_sample_of_another_base_model_is_cancelled_as_any(tenant: Tenant) -> None:
    session = tenant.new_session()
    sampler = tenant.new_sampler("org/judge", session, 0)
    future = tenant.sample(sampler, sampling_params={"max_tokens": None}, num_samples=64)
    request = {"request_id": future["request_id"]}
    assert tenant.http.post("cancel_future", json=request).status_code == 204
    assert tenant.result(future)["error"] == "the request was cancelled"
    assert len(sampled(tenant, sampler, 1)["sequences"]) == 1


def test_stable_reinforce_is_the_loss_that_the_server_was_told_to_compute(
    tenant: Tenant, model: Path
) -> None:
    opened = tenant.post("create_session", tags=[], sdk_version="0")
    note = "loss_fn='stable_reinforce' is computed as 'ppo' on this server"
    assert note in opened["info_message"]
    model_id = tenant.new_model(model)
    outputs = [
        tenant.forward_backward(model_id, seq_id, [21, 22, 23, 24], loss).json()
        for seq_id, loss in enumerate(("ppo", "stable_reinforce"), 1)
    ]
    losses = [tenant.result(each)["metrics"] for each in outputs]
    assert losses[0] == losses[1]
    sampler = tenant.new_sampler("org/policy", opened["session_id"], 0)
    assert len(sampled(tenant, sampler, record_stability_info=True)["sequences"]) == 1


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"stable_reinforce": "gspo"}, "one of importance_sampling, ppo, cispo, got 'gspo'"),
        ({"served_model_name": "a", "sampling_models": {"a": "b"}}, "'a' is the trained base"),
    ],
)
def test_settings_that_cannot_be_are_refused(
    model: Path, judge: Path, settings: dict[str, Any], why: str
) -> None:
    models = dict.fromkeys(settings.pop("sampling_models", ()), judge)
    with pytest.raises(ConfigError, match=why):
        tidegate.tinker_server(model=model, engines=1, sampling_models=models, **settings)


def test_a_sampler_of_another_base_model_outlives_its_server(
    model: Path, judge: Path, tmp_path: Path
) -> None:
    sampler = ""
    for _ in range(2):
        with serve(model, judge, tmp_path) as server, Tenant(server.url, "tml-anybody") as tenant:
            sampler = sampler or tenant.new_sampler(judge)
            found = sampled(tenant, sampler)["prompt_logprobs"][1:]
            assert found == pytest.approx(logprobs_of(judge), abs=1e-4)
