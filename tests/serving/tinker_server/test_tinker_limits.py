"""Limits of what one tenant may have at the same time, and samples that are cancelled."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import tidegate
from tests.serving.tinker_server.tenant_client import Tenant
from tidegate.errors import ConfigError
from tidegate.serving.tinker.tenants import TenantLimits

pytest.importorskip("tinker", reason="make test-tinker installs the SDK")

from tidegate.serving.tinker import sessions

pytestmark = [
    pytest.mark.wire,
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),
]

LONG = {
    "prompt": {"chunks": [{"type": "encoded_text", "tokens": [20, 21]}]},
    "sampling_params": {"max_tokens": 500, "stop": []},
}
"""A sample that takes 5 s at 10 ms per token."""


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[tidegate.TinkerServer]:
    with tidegate.tinker_server(
        model=model,
        engines=1,
        step_time_min_s=0.01,
        api_keys={"tml-alice": "alice", "tml-bob": "bob"},
        limits=TenantLimits(models=1, samples=2),
    ) as server:
        yield server


def test_a_tenants_surplus_samples_are_refused_until_others_are_cancelled(
    server: tidegate.TinkerServer, model: Path
) -> None:
    alice, bob = Tenant(server.url, "tml-alice"), Tenant(server.url, "tml-bob")
    with alice.http, bob.http:
        sampler = alice.new_sampler(model)
        futures = [
            alice.post("asample", sampling_session_id=sampler, seq_id=seq_id, **LONG)
            for seq_id in (0, 1)
        ]
        status, why = alice.refusal("asample", sampling_session_id=sampler, seq_id=2, **LONG)
        assert status == 429
        assert why.startswith("2 samples run, and a tenant may have 2: wait for some")
        bobs = bob.post("asample", sampling_session_id=bob.new_sampler(model), seq_id=0, **LONG)

        for each in futures:
            assert bob.http.post("cancel_future", json=each | {"model_id": None}).status_code == 422
            request = {"request_id": each["request_id"]}
            assert bob.http.post("cancel_future", json=request).status_code == 204  # not his
            assert alice.http.post("cancel_future", json=request).status_code == 204
        assert [alice.result(each) for each in futures] == [
            {"error": "the request was cancelled", "category": "user"}
        ] * 2
        third = alice.post("asample", sampling_session_id=sampler, seq_id=2, **LONG)
        assert len(alice.result(third)["sequences"][0]["tokens"]) == 500
        assert len(bob.result(bobs)["sequences"][0]["tokens"]) == 500


def test_a_tenants_surplus_model_is_refused_until_another_ends(
    server: tidegate.TinkerServer, model: Path
) -> None:
    alice, bob = Tenant(server.url, "tml-alice"), Tenant(server.url, "tml-bob")
    with alice.http, bob.http:
        model_id = alice.new_model(model)
        session = model_id.partition(":")[0]
        second = {
            "session_id": session,
            "model_seq_id": 1,
            "base_model": str(model),
            "lora_config": {"rank": 4},
        }
        status, why = alice.refusal("create_model", **second)
        assert status == 429
        assert "1 models are in training, and a tenant may have 1" in why
        bob.new_model(model)
        alice.result(alice.post("unload_model", model_id=model_id))
        alice.result(alice.post("create_model", **second))


def test_a_killed_clients_model_makes_room_unless_its_session_still_works(
    server: tidegate.TinkerServer, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alice, bob = Tenant(server.url, "tml-alice"), Tenant(server.url, "tml-bob")
    with alice.http, bob.http:
        monkeypatch.setattr(sessions, "SILENT_S", -1.0)  # every client counts as killed
        bobs = bob.new_model(model)
        for _ in range(17):
            alices = alice.new_model(model)  # the one of before goes
        assert alice.post("get_info", model_id=alices)["model_id"] == alices
        assert bob.post("get_info", model_id=bobs)["model_id"] == bobs

        session = alices.partition(":")[0]
        sampler = alice.post(
            "create_sampling_session",
            session_id=session,
            sampling_session_seq_id=0,
            base_model=str(model),
        )["sampling_session_id"]
        sampling = alice.post("asample", sampling_session_id=sampler, seq_id=0, **LONG)
        another = alice.post("create_session", tags=[], sdk_version="0")["session_id"]
        body = {
            "session_id": another,
            "model_seq_id": 0,
            "base_model": str(model),
            "lora_config": {"rank": 4},
        }
        assert alice.refusal("create_model", **body)[0] == 429
        cancelled = {"request_id": sampling["request_id"]}
        assert alice.http.post("cancel_future", json=cancelled).status_code == 204
        alice.result(sampling)
        alice.result(alice.post("create_model", **body))
        monkeypatch.undo()
        assert alice.refusal("create_model", **(body | {"model_seq_id": 1}))[0] == 429


def test_limits_below_one_are_refused() -> None:
    with pytest.raises(ConfigError, match="a tenant's models must be at least 1, got 0"):
        TenantLimits(models=0)
