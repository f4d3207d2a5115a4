"""Limits of what one tenant may have at the same time, and samples that are cancelled."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

import tidegate
from tests.serving.tinker_server.tenant_client import Tenant
from tidegate.errors import ConfigError
from tidegate.serving.tinker.tenants import TenantLimits

pytest.importorskip("tinker", reason="make test-tinker installs the SDK")

from tidegate.serving.tinker import sessions

pytestmark = pytest.mark.wire

LONG: dict[str, Any] = {"sampling_params": {"max_tokens": 500}}
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


def cancel(tenant: Tenant, future: dict[str, Any]) -> int:
    body = {"request_id": future["request_id"]}
    return tenant.http.post("cancel_future", json=body).status_code


def test_a_tenants_surplus_samples_are_refused_until_others_are_cancelled(
    alice: Tenant, bob: Tenant, model: Path
) -> None:
    sampler = alice.new_sampler(model)
    futures = [alice.sample(sampler, seq_id, **LONG) for seq_id in (0, 1)]
    prompt = {"chunks": [{"tokens": [20, 21]}]}
    surplus = {"sampling_session_id": sampler, "seq_id": 2, "prompt": prompt, **LONG}
    status, why = alice.refusal("asample", **surplus)
    assert status == 429
    assert why.startswith("2 samples run, and a tenant may have 2: wait for some")
    bobs = bob.sample(bob.new_sampler(model), **LONG)

    for each in futures:
        assert bob.http.post("cancel_future", json=each | {"model_id": None}).status_code == 422
        assert cancel(bob, each) == 204  # not his
        assert cancel(alice, each) == 204
    assert [alice.result(each) for each in futures] == [
        {"error": "the request was cancelled", "category": "user"}
    ] * 2
    third = alice.sample(sampler, 2, **LONG)
    assert len(alice.result(third)["sequences"][0]["tokens"]) == 500
    assert len(bob.result(bobs)["sequences"][0]["tokens"]) == 500


def test_a_tenants_surplus_model_is_refused_until_another_ends(
    alice: Tenant, bob: Tenant, model: Path
) -> None:
    model_id = alice.new_model(model)
    session = model_id.partition(":")[0]
    refused = alice.create(session, 1, model)
    assert refused.status_code == 429
    assert "1 models are in training, and a tenant may have 1" in refused.text
    bob.new_model(model)
    alice.result(alice.post("unload_model", model_id=model_id))
    alice.result(alice.create(session, 1, model).json())


def test_a_killed_clients_model_makes_room_unless_its_session_still_works(
    alice: Tenant, bob: Tenant, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "SILENT_S", -1.0)  # every client counts as killed
    bobs = bob.new_model(model)
    for _ in range(17):
        alices = alice.new_model(model)  # the one of before goes
    assert alice.post("get_info", model_id=alices)["model_id"] == alices
    assert bob.post("get_info", model_id=bobs)["model_id"] == bobs

    sampling = alice.sample(alice.new_sampler(model, alices.partition(":")[0]), **LONG)
    another = alice.new_session()
    assert alice.create(another, 0, model).status_code == 429
    assert cancel(alice, sampling) == 204
    alice.result(sampling)
    alice.result(alice.create(another, 0, model).json())
    monkeypatch.undo()
    assert alice.create(another, 1, model).status_code == 429


@pytest.fixture(scope="module")
def journalled(
    model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tidegate.TinkerServer]:
    with tidegate.tinker_server(
        model=model,
        engines=1,
        state_directory=tmp_path_factory.mktemp("state"),
        limits=TenantLimits(models=4, sequence_tokens=8),
    ) as server:
        yield server


@pytest.fixture
def tenant(journalled: tidegate.TinkerServer) -> Iterator[Tenant]:
    with Tenant(journalled.url, "tml-anybody") as tenant:
        yield tenant


def finish(tenant: Tenant, session: str) -> httpx.Response:
    return tenant.http.post(f"sessions/{session}/finish", json={})


def test_creates_at_once_make_no_more_models_than_the_limit(tenant: Tenant, model: Path) -> None:
    with ThreadPoolExecutor(24) as threads:
        session = tenant.new_session()
        answers = list(threads.map(lambda n: tenant.create(session, n % 12, model), range(24)))
    created = {each.json()["model_id"] for each in answers if each.status_code == 200}
    assert len(created) == 4
    assert {each.status_code for each in answers} == {200, 429}
    models = tenant.http.get(f"sessions/{session}").json()["training_run_ids"]
    assert set(models) == created
    assert finish(tenant, session).status_code == 204


def test_models_and_samplers_created_beside_the_end_of_their_session_end_with_it(
    tenant: Tenant, model: Path
) -> None:
    def sample(session: str) -> httpx.Response:
        body = {"sampling_session_seq_id": 0, "base_model": str(model)}
        return tenant.http.post("create_sampling_session", json=body | {"session_id": session})

    with ThreadPoolExecutor(8) as threads:
        for _ in range(20):
            session = tenant.new_session()
            sent = [threads.submit(tenant.create, session, number, model) for number in (0, 1)]
            sent.append(threads.submit(sample, session))
            end = threads.submit(finish, tenant, session)
            sent += [threads.submit(tenant.create, session, number, model) for number in (1, 2)]
            assert end.result().status_code == 204
            assert {each.result().status_code for each in sent} <= {200, 404, 410, 429}
            assert tenant.http.get(f"samplers/{session}:sample:0").status_code == 404
    session = tenant.new_session()
    for number in range(4):
        answer = tenant.create(session, number, model)
        assert answer.status_code == 200, answer.text
        assert "error" not in tenant.result(answer.json())
    assert tenant.http.get("training_runs").json()["cursor"]["total_count"] == 4
    assert finish(tenant, session).status_code == 204


def test_a_sequence_that_is_too_long_to_train_on_is_refused_and_later_ones_are_not(
    tenant: Tenant, model: Path
) -> None:
    model_id = tenant.new_model(model)
    long = tenant.forward_backward(model_id, 1, [21] * 9).json()
    why = "data[0] has 9 tokens, and a sequence may have 8: shorten it, or start the server"
    assert why in tenant.result(long)["error"]
    exact = tenant.forward_backward(model_id, 2, [21] * 8).json()
    assert tenant.result(exact)["metrics"]["loss:sum"] > 0


HUGE = 2**64


@pytest.mark.parametrize(
    ("path", "body", "status", "why"),
    [
        ("create_model", {"model_seq_id": -1}, 422, ">= 0"),
        ("create_model", {"model_seq_id": 10**9}, 422, "<= 999999999"),
        ("create_model", {"lora_config": {"rank": HUGE}}, 400, "more than 64 bits"),
        ("create_model", {"lora_config": {"rank": 4, "seed": HUGE}}, 422, "seed"),
        ("create_model", {"user_metadata": {"a": [HUGE]}}, 400, "more than 64 bits"),
        ("create_sampling_session", {"sampling_session_seq_id": -1}, 422, ">= 0"),
        ("create_sampling_session", {"sampling_session_seq_id": HUGE}, 422, "<= 999999999"),
    ],
)
def test_numbers_that_nothing_can_have_are_refused(
    tenant: Tenant,
    model: Path,
    path: str,
    body: dict[str, Any],
    status: int,
    why: str,
) -> None:
    session = tenant.new_session()
    usual: dict[str, Any] = {"session_id": session, "base_model": str(model)}
    if path == "create_model":
        usual |= {"model_seq_id": 0, "lora_config": {"rank": 4}}
    answer = tenant.refusal(path, **(usual | body))
    assert (answer[0], why in answer[1]) == (status, True), answer


def test_numbers_of_a_models_requests_are_refused_in_their_turn_and_training_continues(
    tenant: Tenant, model: Path
) -> None:
    model_id = tenant.new_model(model)
    for seq_id in (0, -1, 10**9 + 1, HUGE):
        answer = tenant.refusal("save_weights", model_id=model_id, seq_id=seq_id)
        assert answer[0] == 400, answer
    assert tenant.refusal("save_weights", model_id=model_id, seq_id=2049)[0] == 429
    sent: list[tuple[str, dict[str, Any], str]] = [
        ("save_weights", {"ttl_seconds": 10**12}, "ttl_seconds must be in [0, 315360000]"),
        ("save_weights", {"ttl_seconds": -1}, "ttl_seconds must be in"),
        ("save_weights", {"ttl_seconds": HUGE}, "ttl_seconds must be in"),
        ("optim_step", {"adam_params": {"beta2": 2}}, "beta2 must be in [0, 1), got 2"),
        ("optim_step", {"optimizer_params": {"type": "x", "n": HUGE}}, "optimizer 'x' is"),
        ("save_weights_for_sampler", {"sampling_session_seq_id": -1}, "must be in [0, 9999"),
        ("save_weights_for_sampler", {"sampling_session_seq_id": HUGE}, "must be in [0, 9999"),
    ]
    for seq_id, (path, body, why) in enumerate(sent, 1):
        future = tenant.post(path, model_id=model_id, seq_id=seq_id, **body)
        result = tenant.result(future)
        assert (result["category"], why in result["error"]) == ("user", True), result
    saved = tenant.post("save_weights", model_id=model_id, seq_id=8, path="a", ttl_seconds=99)
    path = tenant.result(saved)["path"].removeprefix("tinker://")
    run_id, _, name = path.partition("/")
    ttl = f"training_runs/{run_id}/checkpoints/{name}/ttl"
    assert tenant.http.put(ttl, json={"ttl_seconds": 10**12}).status_code == 422
    assert tenant.http.get("checkpoints").status_code == 200
    assert tenant.http.get("training_runs/%00/checkpoints").status_code == 404


@pytest.mark.parametrize(
    ("sampling", "why"),
    [
        ({"top_k": HUGE, "seed": HUGE, "max_tokens": HUGE}, ""),
        ({"stop": [HUGE]}, "token ids must be in [0, 96), got 18446744073709551616"),
        ({"stop": [-1]}, "token ids must be in [0, 96), got -1"),
        ({"max_tokens": -HUGE}, "max_tokens must be at least 1"),
    ],
)
def test_numbers_of_a_sample_are_bounded_or_refused(
    tenant: Tenant, model: Path, sampling: dict[str, Any], why: str
) -> None:
    sent = tenant.sample(tenant.new_sampler(model), sampling_params=sampling)
    assert why in tenant.result(sent).get("error", "")
    assert bool(why) == ("error" in tenant.result(sent))


def test_limits_below_one_are_refused() -> None:
    with pytest.raises(ConfigError, match="a tenant's models must be at least 1, got 0"):
        TenantLimits(models=0)
