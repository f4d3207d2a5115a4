"""Every token that clients of the Tinker server sampled is replayed by the weights that its tag
names."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tidegate
from tidegate.observability.audit.audit import AuditReport, audit_run
from tidegate.observability.records.trajectories import count_trajectories, read_trajectories_of_one

tinker = pytest.importorskip("tinker", reason="make test-tinker installs the SDK")

from tests.serving.tinker_server.sdk_calls import SENTENCE, new_client, train  # noqa: E402
from tests.serving.tinker_server.test_tinker_recovery import (  # noqa: E402
    START_TIMEOUT_S,
    MortalServer,
)

pytestmark = [
    pytest.mark.wire,
    pytest.mark.timeout(600),
]

PROMPT = tinker.ModelInput.from_ints(SENTENCE[:4])
PARAMS = tinker.SamplingParams(max_tokens=60, temperature=1.0, stop=[])


def sample(sampler: Any, times: int = 1) -> list[Any]:
    return [sampler.sample(PROMPT, 2, PARAMS) for _ in range(times)]


def sampled_adapters(directory: Path) -> set[tuple[str, int]]:
    """Return the adapters that sampled tokens in one process's records, and the versions."""
    return {
        (turn.options.adapter.rpartition(":")[2], span.version)
        for rollout in read_trajectories_of_one(directory)
        for turn in rollout.turns
        if turn.options is not None
        for span in turn.spans
    }


def assert_all_replayed(report: AuditReport) -> None:
    assert report.agrees, report.lines()
    assert report.tokens_agreeing == report.tokens > 0


def test_snapshots_and_inflight_samples_of_several_models_are_audited(
    model: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    with (
        tidegate.tinker_server(
            model=model, engines=2, run_directory=run, step_time_min_s=0.01
        ) as server,
        tinker.ServiceClient(base_url=server.url, api_key="tml-anybody") as service,
    ):
        clients = [new_client(service, model, seed=seed) for seed in range(2)]
        futures = sample(service.create_sampling_client(base_model=str(model)).result())
        for _ in range(3):
            for client in clients:
                train(client, steps=1)
                futures += sample(client.save_weights_and_get_sampling_client().result(), 2)
                inflight = client.save_weights_and_get_sampling_client(kind="inflight").result()
                futures += sample(inflight, 2)  # continue under the next one's weights
        lengths = [len(s.tokens) for future in futures for s in future.result().sequences]
    report = audit_run(run)
    assert_all_replayed(report)
    assert report.tokens == sum(lengths)
    assert report.spans_mixed > 0
    assert {("0", 3), ("1", 3), ("inflight", 3)} <= sampled_adapters(run)


def wait_for_trajectories(directory: Path, count: int) -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while count_trajectories(directory) < count:
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


@pytest.fixture
def recorded(model: Path, tmp_path: Path) -> Iterator[MortalServer]:
    server = MortalServer(model, tmp_path / "state", tmp_path / "run")
    try:
        server.start()
        yield server
    finally:
        server.close()


@pytest.mark.slow
def test_samples_before_and_after_a_kill_are_audited_by_their_own_versions(
    recorded: MortalServer, model: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    service = tinker.ServiceClient(base_url=recorded.url, api_key="tml-anybody")
    client = new_client(service, model)
    train(client, steps=1)
    first = client.save_weights_and_get_sampling_client().result()
    train(client, steps=1)
    inflight = client.save_weights_and_get_sampling_client(kind="inflight").result()
    for future in [*sample(inflight), *sample(first)]:
        future.result()
    wait_for_trajectories(run, 4)  # 2 sequences of 2 samplers
    recorded.kill()
    recorded.start()
    # The new engines count versions anew: the adapters' first ones have other weights now.
    train(client, steps=1)
    second = client.save_weights_and_get_sampling_client().result()
    futures = [*sample(second), *sample(first), *sample(inflight)]
    for future in futures:
        future.result()
    wait_for_trajectories(run / "part-1", 6)
    service.close("success").result()
    recorded.kill()

    report = audit_run(run)
    assert_all_replayed(report)
    assert report.rollouts == 10
    assert sampled_adapters(run) == {("0", 1), ("inflight", 1)}
    assert {("0", 1), ("0", 2)} < sampled_adapters(run / "part-1")
