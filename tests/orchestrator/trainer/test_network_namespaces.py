"""Tests that a run continues without a host that is cut off, and uses it again afterwards.

`make test-namespaces` runs it: it makes networks, which wants root and a machine to itself.
"""

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import zmq
from safetensors.torch import load_file
from zmq.utils.monitor import recv_monitor_message

import tidegate
from tests.models import make_model_directory
from tests.namespaces import Network, are_allowed
from tidegate.observability.audit.audit import audit_run
from tidegate.transport.security import make_keys
from tidegate.transport.zeromq import new_socket

pytestmark = [
    pytest.mark.wire,
    pytest.mark.skipif(
        not os.environ.get("TIDEGATE_NAMESPACES") or not are_allowed(),
        reason="needs root, and network namespaces; run `make test-namespaces`",
    ),
]

WAIT_S = 100.0
"""Far longer than anything here takes: reaching it is a failure, not a timing. Without questions of
TCP's own it would be reached: a connection on which nothing is sent is believed in for ever."""

WAIT_MS = round(1000 * WAIT_S)

PORT = 7531


@pytest.fixture
def network() -> Iterator[Network]:
    with Network(2) as made:
        yield made


async def one_turn(episode: tidegate.Episode, task: int) -> float:
    episode.append([10 + task % 40, 11, 12])
    turn = await episode.generate(max_tokens=12)
    return float(turn.token_ids[0] % 2)


def started(command: list[str]) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(command)


async def until_engines(rollouts: tidegate.Rollouts, count: int) -> None:
    async with asyncio.timeout(WAIT_S):
        while len(rollouts.statistics().engines) != count:  # noqa: ASYNC110 - a process's doing
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("is_waited_for", [False, True], ids=["nothing-sent", "something-sent"])
def test_both_ends_give_a_cut_connection_up_and_make_another_once_it_is_mended(
    network: Network, is_waited_for: bool
) -> None:
    address = f"tcp://{network.address}:{PORT}"
    near = new_socket(zmq.ROUTER, address)
    monitor = near.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    near.bind(address)
    command = network.command(0, sys.executable, "-m", "tests.transport.far_end", address)
    far = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert near.poll(WAIT_MS)
        peer, _ = near.recv_multipart()
        network.cut(0)
        if is_waited_for:
            near.send_multipart([peer, b"anybody there?"])
        assert monitor.poll(WAIT_MS)
        assert recv_monitor_message(monitor)["event"] == zmq.EVENT_DISCONNECTED
        assert far.stdout is not None
        assert [far.stdout.readline() for _ in range(2)] == ["connected\n", "broken\n"]
        network.mend(0)
        assert near.poll(WAIT_MS)
        assert near.recv_multipart()[1] == b"here"
        assert far.stdout.readline() == "connected\n"
    finally:
        far.kill()
        far.communicate()
        near.disable_monitor()
        monitor.close()
        near.close(linger=0)


@pytest.mark.parametrize("channel", ["relay", "zmq"])
async def test_a_host_that_is_cut_off_and_comes_back_costs_no_token(
    network: Network, tmp_path: Path, channel: str
) -> None:
    model = make_model_directory(tmp_path / "qwen3")
    make_keys(tmp_path / "keys")
    address = f"tcp://{network.address}:{PORT}"
    state, noise = load_file(model / "model.safetensors"), torch.Generator().manual_seed(0)
    worker = [sys.executable, "-m", "tidegate.engine.worker", "--connect", address]
    worker += ["--model", str(model), "--curve-key-directory", str(tmp_path / "keys" / "engine")]
    engines = [
        started(network.command(host, *worker, "--engine", f"far-{host}")) for host in (0, 1)
    ]
    try:
        async with tidegate.serve(
            model=model,
            engines=0,
            group_size=2,
            groups_per_batch=2,
            max_running_turns=8,
            listen_address=address,
            curve_key_directory=tmp_path / "keys",
            weight_channel=channel,  # type: ignore[arg-type]
            run_directory=tmp_path / "run",
            heartbeat_interval_s=0.2,
            engine_timeout_s=3.0,
            engine_start_timeout_s=WAIT_S,
        ) as rollouts:
            await until_engines(rollouts, 2)
            batches = 0
            async for _ in rollouts.batches(range(20), episode=one_turn):
                batches += 1
                if batches == 3:
                    network.cut(1)
                    await until_engines(rollouts, 1)
                if batches == 7:
                    network.mend(1)
                    await until_engines(rollouts, 2)
                for tensor in state.values():
                    tensor += 0.02 * torch.randn(tensor.shape, generator=noise)
                await rollouts.publish(state)
        for engine in engines:
            assert engine.wait(WAIT_S) == 0
    finally:
        for engine in engines:
            engine.kill()
            engine.wait()
    statistics = rollouts.statistics()
    assert statistics.batches == 10
    assert statistics.ledger.error == 0
    assert statistics.ledger.trained > 0
    report = audit_run(tmp_path / "run")
    assert report.agrees, report.lines()
    assert report.tokens == statistics.ledger.trained
