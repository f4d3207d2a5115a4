"""Tests that no request of a tenant keeps a killed server from starting again for the others."""

import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

pytest.importorskip("tinker", reason="make test-tinker installs the SDK")

from tinker.proto import tinker_public_pb2 as pb

from tests.serving.tinker_server.tenant_client import Tenant
from tests.serving.tinker_server.test_tinker_recovery import MortalServer
from tidegate.serving.tinker.journal import (
    ATTEMPTS_MAX,
    RequestAccepted,
    append_record,
)

pytestmark = [pytest.mark.wire, pytest.mark.slow, pytest.mark.timeout(600)]

TARGETS = [21, 22, 23, 24]


@pytest.fixture
def tenant(mortal: MortalServer) -> Iterator[Tenant]:
    with Tenant(mortal.url, "tml-anybody") as tenant:
        yield tenant


def journal_of(mortal: MortalServer, model_id: str) -> Path:
    return mortal.state / model_id / "journal" / "1.requests"


def step(tenant: Tenant, model_id: str, seq_id: int, **adam: float) -> dict[str, Any]:
    future = tenant.post("optim_step", model_id=model_id, seq_id=seq_id, adam_params=adam)
    return tenant.result(future)


def train(tenant: Tenant, model_id: str, seq_id: int = 1) -> float:
    """Send a gradient and a step, and return the loss."""
    answer = tenant.forward_backward(model_id, seq_id, TARGETS)
    assert answer.status_code == 200, answer.text
    loss: float = tenant.result(answer.json())["metrics"]["loss:sum"]
    assert step(tenant, model_id, seq_id + 1, learning_rate=0.02)["metrics"]["grad_norm"] > 0
    return loss


def restart(mortal: MortalServer) -> None:
    mortal.kill()
    mortal.start()


def test_more_requests_than_may_wait_are_carried_out_after_a_kill(
    mortal: MortalServer, tenant: Tenant, model: Path
) -> None:
    model_id = tenant.new_model(model)
    futures: list[dict[str, Any]] = []
    while len(futures) < 60:  # of which 40 may wait
        answer = tenant.forward_backward(model_id, len(futures) + 1, TARGETS)
        if answer.status_code == 200:
            futures.append(answer.json())
        else:
            assert (answer.status_code, "too far ahead" in answer.text) == (429, True)
    restart(mortal)
    losses = {tenant.result(each)["metrics"]["loss:sum"] for each in futures}
    assert len(losses) == 1
    assert step(tenant, model_id, 61)["metrics"]["grad_norm"] > 0


@pytest.mark.parametrize("is_written", [False, True])
def test_a_server_starts_beside_diverged_inflight_weights(
    mortal: MortalServer, tenant: Tenant, model: Path, is_written: bool
) -> None:
    model_id = tenant.new_model(model)
    train(tenant, model_id)
    save = {"model_id": model_id, "sampling_session_seq_id": 0, "kind": "inflight"}
    saved = tenant.result(tenant.post("save_weights_for_sampler", seq_id=3, **save))
    tenant.result(tenant.forward_backward(model_id, 4, TARGETS).json())
    step(tenant, model_id, 5, learning_rate=1e30, weight_decay=1e30)
    second = save | {"sampling_session_seq_id": 1, "seq_id": 6}
    refusal = tenant.result(tenant.post("save_weights_for_sampler", **second))
    assert refusal["category"] == "user"
    assert "has NaN or infinity, which engines refuse: training has diverged" in refusal["error"]
    mortal.kill()
    if is_written:  # as servers before this release did
        file = mortal.state / model_id / "sampler_weights/inflight-live/adapter_model.safetensors"
        tensors = load_file(file)
        save_file({name: np.full_like(each, np.nan) for name, each in tensors.items()}, file)
    mortal.start()
    assert saved["sampling_session_id"].startswith(model_id.partition(":")[0])
    assert tenant.post("get_info", model_id=model_id)["lora_rank"] == 4
    assert train(tenant, tenant.new_model(model)) > 0


def test_a_request_that_ends_every_server_is_refused_after_some_starts(
    mortal: MortalServer, tenant: Tenant, model: Path
) -> None:
    model_id = tenant.new_model(model)
    mortal.die_in("after forward-backward", always=True)
    deadly = tenant.forward_backward(model_id, 1, TARGETS).json()
    for _ in range(ATTEMPTS_MAX):
        mortal.kill()
        mortal.start(is_mortal=True)
    restart(mortal)
    (mortal.deaths / "after forward-backward").unlink()
    assert tenant.result(deadly)["category"] == "server"
    assert "the server ended several times while it carried out" in tenant.result(deadly)["error"]
    refused = step(tenant, model_id, 2)
    assert "request 1 failed half-way" in refused["error"]
    assert train(tenant, model_id, 3) > 0
    restart(mortal)
    assert "the server ended several times" in tenant.result(deadly)["error"]


def test_a_moment_of_full_disk_loses_nothing_that_was_acknowledged(
    mortal: MortalServer, tenant: Tenant, model: Path
) -> None:
    expected = [train(tenant, other, 1) for other in [tenant.new_model(model)]]
    model_id = tenant.new_model(model)
    expected.append(train(tenant, model_id, 1))
    mortal.limit_files(10 + journal_of(mortal, model_id).stat().st_size)
    answers = [tenant.forward_backward(model_id, 3, TARGETS) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [503, 503]
    assert "the request can't be written to the server's journal" in answers[0].text
    mortal.limit_files(10 + (mortal.state / "sessions.journal").stat().st_size)
    assert tenant.refusal("create_session", tags=[], sdk_version="0")[0] == 503
    mortal.limit_files(resource.RLIM_INFINITY)
    later = tenant.new_model(model)
    loss = train(tenant, model_id, 3)
    assert expected[0] == expected[1] > loss
    restart(mortal)
    assert train(tenant, model_id, 5) < loss
    assert train(tenant, later, 1) == expected[0]


def test_records_that_cannot_be_read_are_passed_over(
    mortal: MortalServer, tenant: Tenant, model: Path
) -> None:
    model_id, beside = tenant.new_model(model), tenant.new_model(model)
    train(tenant, model_id)
    mortal.kill()
    for seq_id, path in ((3, "forward_backward"), (4, "a path of a later release")):
        record = RequestAccepted(seq_id=seq_id, path=path, body=b"\xff\xff")
        append_record(journal_of(mortal, model_id), record)
    append_record(mortal.state / "sessions.journal", record)
    broken = mortal.state / f"{beside}1" / "journal"
    broken.mkdir(parents=True)
    (broken / "1.requests").mkdir()
    mortal.start()
    result = tenant.result({"request_id": f"{model_id}:3"})
    assert "the restarted server can't read this request" in result["error"]
    assert train(tenant, model_id, 5) > 0
    assert train(tenant, beside) > 0


def test_a_failed_request_stays_failed_after_a_kill(
    mortal: MortalServer, tenant: Tenant, model: Path
) -> None:
    model_id = tenant.new_model(model)
    mortal.die_in("error after forward-backward")
    failed = tenant.forward_backward(model_id, 1, TARGETS).json()
    before = [tenant.result(failed), step(tenant, model_id, 2)]
    assert before[0] == {"error": "MemoryError: planted", "category": "server"}
    assert "request 1 failed half-way" in before[1]["error"]
    loss = train(tenant, model_id, 3)
    restart(mortal)
    after = [tenant.result({"request_id": f"{model_id}:{seq_id}"}) for seq_id in (1, 2, 3)]
    assert after[:2] == before
    assert after[2]["metrics"]["loss:sum"] == loss


def test_a_sparse_tensor_is_refused_by_its_size_with_zeros(
    mortal: MortalServer, tenant: Tenant, model: Path
) -> None:
    model_id = tenant.new_model(model)
    request = pb.ForwardBackwardRequest(model_id=model_id, seq_id=1, loss_fn="cross_entropy")
    datum = request.data.add()
    datum.model_input.add().encoded_text.tokens = np.arange(20, 24, dtype="<i4").tobytes()
    tensor = datum.loss_fn_inputs["target_tokens"]
    tensor.dtype = pb.DTYPE_INT64
    tensor.shape.extend([4, 300_000_000])
    tensor.sparse_csr.values = tensor.sparse_csr.col_indices = b""
    tensor.sparse_csr.crow_indices = np.zeros(5, "<i8").tobytes()
    sent = tenant.send(request).json()
    restart(mortal)
    why = "the request's sparse tensors have 1200000000 values with their zeros, and may have"
    assert why in tenant.result(sent)["error"]
    assert train(tenant, model_id, 2) > 0
