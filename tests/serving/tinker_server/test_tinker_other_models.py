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

pytestmark = [
    pytest.mark.wire,
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),
]

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


@pytest.fixture
def tenant(server: tidegate.TinkerServer) -> Iterator[Tenant]:
    tenant = Tenant(server.url, "tml-anybody")
    with tenant.http:
        yield tenant


def new_sampler(tenant: Tenant, session: str, number: int, base_model: str) -> str:
    body = {"session_id": session, "sampling_session_seq_id": number, "base_model": base_model}
    sampler_id: str = tenant.post("create_sampling_session", **body)["sampling_session_id"]
    return sampler_id


def sampled(tenant: Tenant, sampler: str, seq_id: int = 0, **more: Any) -> dict[str, Any]:
    body = {
        "sampling_session_id": sampler,
        "seq_id": seq_id,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": PROMPT}]},
        "sampling_params": {"max_tokens": 3, "stop": []},
        "prompt_logprobs": True,
    }
    return tenant.result(tenant.post("asample", **(body | more)))


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
    session = tenant.post("create_session", tags=[], sdk_version="0")["session_id"]
    for number, (name, directory) in enumerate({"org/policy": model, "org/judge": judge}.items()):
        sampler = new_sampler(tenant, session, number, name)
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
    session = tenant.post("create_session", tags=[], sdk_version="0")["session_id"]
    sampler = new_sampler(tenant, session, 0, "org/judge")
    body = {
        "sampling_session_id": sampler,
        "seq_id": 0,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": PROMPT}]},
        "sampling_params": {"stop": []},
        "num_samples": 64,
    }
    future = tenant.post("asample", **body)
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
    losses = [
        tenant.result(tenant.policy_gradient(model_id, seq_id, loss).json())["metrics"]
        for seq_id, loss in enumerate(("ppo", "stable_reinforce"), 1)
    ]
    assert losses[0] == losses[1]
    sampler = new_sampler(tenant, opened["session_id"], 0, "org/policy")
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
        with serve(model, judge, tmp_path) as server:
            tenant = Tenant(server.url, "tml-anybody")
            with tenant.http:
                if not sampler:
                    session = tenant.post("create_session", tags=[], sdk_version="0")["session_id"]
                    sampler = new_sampler(tenant, session, 0, str(judge))
                found = sampled(tenant, sampler)["prompt_logprobs"][1:]
                assert found == pytest.approx(logprobs_of(judge), abs=1e-4)
