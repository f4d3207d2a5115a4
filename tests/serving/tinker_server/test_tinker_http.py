"""The Tinker API over plain HTTP: retries, order, keys, refusals, and what JSON answers add."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

import tidegate
from tests.reference_cycles import cycles_found
from tests.serving.tinker_server.tenant_client import Tenant
from tidegate.errors import ConfigError

pytest.importorskip("tinker", reason="make test-tinker installs the SDK")

pytestmark = pytest.mark.wire

KEYS = {"tml-alice": "alice", "tml-bob": "bob"}


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[tidegate.TinkerServer]:
    with tidegate.tinker_server(model=model, engines=1, api_keys=KEYS) as server:
        yield server


def test_every_path_but_healthz_wants_a_key(server: tidegate.TinkerServer) -> None:
    from tidegate.serving.tinker.app import PATHS

    with httpx.Client(base_url=server.url) as stranger:
        answers = {one.path: stranger.request(one.method, one.path) for one in PATHS}
    refused = {path for path, answer in answers.items() if answer.status_code == 401}
    assert answers.keys() - refused == {"/api/v1/healthz"}


@pytest.mark.parametrize(
    ("to", "content_type", "content"),
    [
        ("forward_backward", "application/x-protobuf", b"\xff" * 1000),
        ("forward_backward", "application/json", b"{}"),
        ("optim_step", "application/json", b"{"),
        ("create_session", "application/json", b"[1]"),
        ("asample", "application/json", b'{"prompt": 1}'),
        ("retrieve_future", "application/json", b'{"request_id": "x"}'),
        ("load_weights", "application/json", b'{"path": "tinker://x/weights/y"}'),
        ("nowhere", "application/json", b"{}"),
    ],
)
def test_an_error_answer_leaves_no_reference_cycle_that_keeps_the_body(
    alice: Tenant, to: str, content_type: str, content: bytes
) -> None:
    def refused() -> bool:
        headers = {"Content-Type": content_type}
        return alice.http.post(to, content=content, headers=headers).status_code >= 400

    assert refused()
    with cycles_found() as cycles:
        assert refused()
    assert not cycles


def test_requests_sent_out_of_order_or_again_are_carried_out_once_in_order(
    alice: Tenant, model: Path
) -> None:
    model_id = alice.new_model(model)
    step = {"model_id": model_id, "seq_id": 2, "adam_params": {"learning_rate": 0.1}}
    futures = [alice.post("optim_step", **step)]  # before the gradient that it is of
    targets = [21, 22, 23, 24]
    futures += [alice.forward_backward(model_id, 1, targets).json() for _ in range(2)]
    futures += [alice.post("optim_step", **step) for _ in range(2)]
    futures += [alice.forward_backward(model_id, 3, targets).json()]
    assert [f["request_id"].rpartition(":")[2] for f in futures] == ["2", "1", "1", "2", "2", "3"]
    first, again, third = (alice.result(futures[i]) for i in (1, 2, 5))
    assert first == again
    assert alice.result(futures[0])["metrics"]["grad_norm"] > 0
    losses = [each["metrics"]["loss:sum"] for each in (first, third)]
    assert losses[1] < losses[0]

    status, why = alice.refusal("optim_step", model_id=model_id, seq_id=2, adam_params={})
    assert (status, "seq_id 2 was used by another request" in why) == (400, True)


def test_the_json_answer_of_a_sample_says_which_weights_sampled_each_token(
    alice: Tenant, model: Path
) -> None:
    model_id = alice.new_model(model)
    alice.forward_backward(model_id, 1, [21, 22, 23, 24])
    alice.post("optim_step", model_id=model_id, seq_id=2, adam_params={})
    future = alice.post(
        "save_weights_for_sampler", model_id=model_id, seq_id=3, sampling_session_seq_id=0
    )
    sampler_id = alice.result(future)["sampling_session_id"]
    futures = [alice.sample(sampler_id, sampling_params={"max_tokens": 5}) for _ in range(2)]
    assert futures[0] == futures[1]
    assert futures[0]["sample_sequence_ids"] == [f"{sampler_id}:0:0"]
    (sequence,) = alice.result(futures[0])["sequences"]
    assert len(sequence["tokens"]) == len(sequence["logprobs"]) == 5
    assert sequence["stop_reason"] == "length"
    assert sequence["weight_versions"] == [
        {
            "start": 0,
            "end": 5,
            "adapter": model_id,
            "version": 1,
            "optimizer_steps": 1,
            "kv": "fresh",
        }
    ]


def test_a_tenant_neither_sees_nor_uses_what_is_anothers(
    alice: Tenant, bob: Tenant, model: Path
) -> None:
    model_id = alice.new_model(model)
    session_id = model_id.partition(":")[0]
    save = alice.post("save_weights_for_sampler", model_id=model_id, seq_id=1, path="mine")
    path = alice.result(save)["path"]
    assert bob.refusal("get_info", model_id=model_id)[0] == 404
    assert bob.forward_backward(model_id, 2, [1, 2, 3, 4]).status_code == 404
    assert bob.refusal("optim_step", model_id=model_id, seq_id=2, adam_params={})[0] == 404
    assert bob.refusal("session_heartbeat", session_id=session_id)[0] == 410
    assert bob.refusal("retrieve_future", request_id=save["request_id"])[0] == 410
    own = bob.new_session()
    status, why = bob.refusal(
        "create_sampling_session", session_id=own, sampling_session_seq_id=0, model_path=path
    )
    assert status == 400
    assert why.startswith(f"there is no checkpoint {path} of yours;")
    alice.post("session_heartbeat", session_id=session_id)
    assert alice.result(save)["path"] == path


def test_requests_that_cannot_be_read_or_have_no_owner_are_refused(
    server: tidegate.TinkerServer, alice: Tenant
) -> None:
    stranger = Tenant(server.url, "tml-stranger")
    with stranger.http:
        assert stranger.http.get("healthz").json() == {"status": "ok"}
        assert stranger.refusal("create_session", tags=[])[0] == 401
    assert alice.http.post("create_session", content="x=1").status_code == 415
    assert alice.refusal("create_session", tag=[])[0] == 422
    assert alice.http.get("nothing").status_code == 404
    assert "is not served by Tidegate" in alice.refusal("create_custom_loss")[1]
    garbage = {"content": b"\xff", "headers": {"content-type": "application/x-protobuf"}}
    assert alice.http.post("forward_backward", **garbage).status_code == 400  # type: ignore[arg-type]
    assert alice.refusal("retrieve_future", request_id="unknown")[0] == 410
    assert alice.refusal("forward_backward", model_id="x", seq_id=1, forward_backward_input={}) == (
        415,
        "training requests must be protobuf: use the SDK of release 0.24.1 or later",
    )


@pytest.mark.slow
def test_the_oldest_release_of_the_sdk_trains_samples_and_saves(
    server: tidegate.TinkerServer, model: Path
) -> None:
    release = Path(sys.prefix) / "sdk-0.24.1"
    if not release.exists():
        pytest.skip("make test-tinker installs it")
    program = Path(__file__).with_name("release_client.py")
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", str(program), server.url, str(model)],
        env={**os.environ, "PYTHONPATH": str(release), "TINKER_API_KEY": "tml-alice"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert ran.returncode == 0, ran.stderr
    assert float(ran.stdout) < 1e-4


def test_a_server_that_others_reach_needs_keys_that_the_sdk_accepts(model: Path) -> None:
    with pytest.raises(ConfigError, match="so the server needs API keys"):
        tidegate.tinker_server(model=model, host="0.0.0.0")
    with pytest.raises(ConfigError, match="tenant 'eve' must begin with 'tml-'"):
        tidegate.tinker_server(model=model, api_keys={"secret": "eve"})
