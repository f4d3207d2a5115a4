"""Tests of all weight channels: bytes arrive unchanged, and nothing is left over."""

import ast
import gc
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.layers import ROOT
from tidegate.errors import ConfigError, WeightsRefused
from tidegate.transport.messages import InitWeights, TensorSpec, UpdateWeights, encode
from tidegate.transport.weight_channels import (
    CHANNELS,
    NamedBuffer,
    WeightSender,
    collective_rounds,
    readable_channels,
    receiver,
    sender,
    weight_channel,
)
from tidegate.transport.weight_channels.base import ITEM_BYTES, views

pytestmark = pytest.mark.wire

ENGINE = """
import hashlib, json, sys
from tidegate.transport.messages import InitWeights, UpdateWeights, decode_from_orchestrator
from tidegate.transport.weight_channels import receiver

for line in sys.stdin:
    message = decode_from_orchestrator(bytes.fromhex(line))
    if isinstance(message, InitWeights):
        weights = receiver(message)
    else:
        seen = {s.name: hashlib.sha256(view).hexdigest() for s, view in weights.tensors(message)}
        print(json.dumps(seen), flush=True)
weights.close()
"""


class Engine:
    """A second process that reports the hashes of what it reads."""

    def __init__(self, init: InitWeights) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-W", "error", "-c", ENGINE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._send(init)

    def hashes(self, update: UpdateWeights) -> dict[str, str]:
        self._send(update)
        assert self.process.stdout is not None
        return dict(json.loads(self.process.stdout.readline()))

    def finish(self) -> str:
        """End the process; return its standard error."""
        return self.process.communicate(timeout=60)[1]

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=60)

    def _send(self, message: InitWeights | UpdateWeights) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(encode(message).hex() + "\n")
        self.process.stdin.flush()


def bfloat16(name: str, *shape: int) -> NamedBuffer:
    """Return a tensor of random bytes."""
    nbytes = 2
    for dimension in shape:
        nbytes *= dimension
    return NamedBuffer(name, "bfloat16", shape, memoryview(os.urandom(nbytes)))


def hashes(tensors: list[NamedBuffer]) -> dict[str, str]:
    return {tensor.name: sha256(tensor.data).hexdigest() for tensor in tensors}


def shared_memory_files() -> set[str]:
    """Return the files in /dev/shm that could be ours."""
    return {name for name in os.listdir("/dev/shm") if name.startswith(("psm_", "tidegate"))}


@pytest.fixture(params=readable_channels(has_gpu=False))
def weights(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[WeightSender]:
    monkeypatch.setattr(collective_rounds, "ROUND_TIMEOUT_S", 5.0)  # of a round with a killed one
    channel = sender(request.param, tmp_path / "weights")
    yield channel
    channel.close()
    channel.close()


def test_each_version_arrives_in_another_process_also_when_it_grows_and_shrinks(
    weights: WeightSender,
) -> None:
    assert weights.init().channel in readable_channels(has_gpu=False)
    engine = Engine(weights.init())
    for version, rows in enumerate([8, 3000, 5, 6000]):
        tensors = [
            bfloat16("lm_head.weight", rows, 129),
            bfloat16("bias", 3),
            bfloat16("scale"),
            bfloat16("nothing", 0, 7),
            NamedBuffer("mask", "bool", (5,), memoryview(b"\0\1\0\1\1")),
            NamedBuffer("norm", "float32", (rows,), memoryview(os.urandom(4 * rows))),
        ]
        [update] = weights.write(version, tensors)
        assert (update.version, update.is_last) == (version, True)
        assert engine.hashes(update) == hashes(tensors)
    assert engine.finish() == ""


def test_kept_versions_can_still_be_read_and_the_room_between_them_is_used(
    weights: WeightSender,
) -> None:
    engine = Engine(weights.init())
    written: dict[int, tuple[UpdateWeights, dict[str, str]]] = {}
    for version, rows in enumerate([700, 40, 900, 30, 10, 30, 500]):
        keep = {0: [], 1: [0], 2: [0, 1], 3: [1, 2]}.get(version, [1, 2, version - 1])
        for _ in range(2):  # as if the first attempt had failed
            tensors = [bfloat16("w", rows), bfloat16("bias", 3)]
            [update] = weights.write(version, tensors, keep=keep)
            written = {v: written[v] for v in keep} | {version: (update, hashes(tensors))}
            for message, expected in written.values():
                assert engine.hashes(message) == expected
    assert engine.finish() == ""


def test_shared_memory_for_versions_of_one_size_is_room_for_two() -> None:
    weights = sender("shm")
    for version in range(6):
        [update] = weights.write(version, [bfloat16("w", 10_000)], keep=[version - 1])
    assert os.stat(update.location).st_size == 2 * 20480  # 10,000 x 2 B in whole pages
    weights.close()


def test_killing_a_receiver_leaves_the_others_and_the_machine_as_they_were(
    weights: WeightSender,
) -> None:
    before = shared_memory_files()
    doomed, survivor = Engine(weights.init()), Engine(weights.init())
    [update] = weights.write(1, first := [bfloat16("w", 100)])
    assert doomed.hashes(update) == survivor.hashes(update) == hashes(first)
    doomed.kill()

    [update] = weights.write(2, second := [bfloat16("w", 5000)])
    assert survivor.hashes(update) == hashes(second)
    late = Engine(weights.init())
    assert late.hashes(update) == hashes(second)
    assert survivor.finish() == late.finish() == ""
    weights.close()
    assert shared_memory_files() == before


def test_killing_the_sender_leaves_no_shared_memory_behind() -> None:
    before = shared_memory_files()
    program = (
        "import sys; from tidegate.transport.weight_channels import *;"
        "w = sender('shm');"
        "w.write(0, [NamedBuffer('w', 'uint8', (1 << 20,), memoryview(bytes(1 << 20)))]);"
        "from tidegate.transport.messages import encode;"
        "print(encode(w.init()).hex(), flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    init = msgspec.msgpack.decode(bytes.fromhex(process.stdout.readline()), type=InitWeights)
    process.kill()
    process.communicate(timeout=60)
    assert shared_memory_files() == before
    with pytest.raises(WeightsRefused, match="is the sender alive"):
        receiver(init)


def test_a_view_is_the_receivers_own_and_outlives_it(weights: WeightSender) -> None:
    [update] = weights.write(0, [NamedBuffer("w", "uint8", (4,), memoryview(b"abcd"))])
    one, other = receiver(weights.init()), receiver(weights.init())
    [(_, view)] = one.tensors(update)
    view[0] = ord("X")
    assert [bytes(seen) for _, seen in other.tensors(update)] == [b"abcd"]
    for end in (one, other, one):
        end.close()
    weights.close()
    gc.collect()
    assert bytes(view) == b"Xbcd"


def test_views_of_shared_memory_are_no_copies() -> None:
    weights = sender("shm")
    [update] = weights.write(0, [bfloat16("a", 4), bfloat16("b", 4)])
    end = receiver(weights.init())
    (_, a), (_, b) = end.tensors(update)
    assert a.obj is b.obj
    end.close()
    weights.close()


def test_shared_memory_is_used_again() -> None:
    weights = sender("shm")
    inodes, files = set(), set()
    for version, rows in enumerate([10, 10_000, 10]):
        [update] = weights.write(version, [bfloat16("w", rows)])
        inodes.add(weights.init().info["inode"])
        files.add((update.location, os.stat(update.location).st_size))
    assert len(inodes) == 1
    assert {size for _, size in files} == {4096, 20480}  # 10,000 x 2 B in whole pages
    weights.close()


def test_a_segment_that_took_over_the_path_is_not_mistaken_for_the_senders() -> None:
    first = sender("shm")
    init = first.init()
    first.close()
    second = sender("shm")  # the lowest free descriptor is the one just closed
    assert second.init().info["path"] == init.info["path"]
    with pytest.raises(WeightsRefused, match="is another segment than the sender's"):
        receiver(init)
    second.close()


# ------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        (TensorSpec("w", "float31", [2], 0, 8), "dtype 'float31'"),
        (TensorSpec("w", "float32", [3], 0, 8), "takes 12 bytes, but its spec says 8"),
        (TensorSpec("w", "float32", [-1, -2], 0, 8), "negative dimension"),
        (TensorSpec("w", "float32", [2], 93, 8), r"\[93, 101\) is outside"),
        (TensorSpec("w", "float32", [2], -8, 8), "outside of the buffer"),
        (TensorSpec("w", "float32", [1 << 40, 1 << 40], 0, 1 << 82), "outside of the buffer"),
        (TensorSpec("good", "uint8", [1], 0, 1), "appears twice"),
    ],
)
def test_a_spec_that_makes_no_sense_is_refused_before_any_tensor_is_given(
    spec: TensorSpec, why: str
) -> None:
    good = TensorSpec("good", "uint8", [100], 0, 100)
    with pytest.raises(WeightsRefused, match=why):
        views([good, spec], memoryview(bytes(100)))


@given(
    st.lists(
        st.builds(
            TensorSpec,
            st.text(max_size=3),
            st.sampled_from([*ITEM_BYTES, "int4"]),
            st.lists(st.integers(-2, 9), max_size=3),
            st.integers(-3, 70),
            st.integers(-3, 70),
        ),
        max_size=4,
    )
)
@settings(deadline=None)
def test_any_spec_is_refused_or_gives_exactly_its_bytes(specs: list[TensorSpec]) -> None:
    buffer = bytes(range(64))
    try:
        found = list(views(specs, memoryview(buffer)))
    except WeightsRefused:
        return
    assert [spec for spec, _ in found] == specs
    for spec, view in found:
        assert bytes(view) == buffer[spec.offset : spec.offset + spec.nbytes]
        assert len(view) == spec.nbytes


@pytest.mark.parametrize(
    ("tensors", "why"),
    [
        ([NamedBuffer("w", "float32", (2,), memoryview(bytes(7)))], "takes 8 bytes"),
        ([NamedBuffer("w", "complex64", (1,), memoryview(bytes(8)))], "dtype 'complex64'"),
        ([NamedBuffer("w", "uint8", (4,), memoryview(bytes(8))[::2])], "not contiguous"),
        ([NamedBuffer("w", "uint8", (1,), memoryview(b"x"))] * 2, "appears twice"),
    ],
)
def test_a_sender_refuses_what_no_receiver_would_take(
    weights: WeightSender, tensors: list[NamedBuffer], why: str
) -> None:
    with pytest.raises(WeightsRefused, match=why):
        weights.write(0, tensors)


def test_a_segment_other_than_the_one_agreed_on_is_refused() -> None:
    weights = sender("shm")
    end = receiver(weights.init())
    with pytest.raises(WeightsRefused, match="agreed on at init"):
        end.tensors(UpdateWeights(version=0, location="/etc/passwd", tensors=[]))
    end.close()
    weights.close()


@pytest.mark.parametrize(
    "info", [{}, {"path": 3}, {"directory": "/nowhere"}, {"path": "/dev/null"}]
)
@pytest.mark.parametrize("channel", [*CHANNELS, "pigeon"])
def test_an_init_that_leads_nowhere_is_refused(channel: str, info: dict[str, Any]) -> None:
    with pytest.raises(WeightsRefused):
        receiver(InitWeights(channel=channel, info=info))


def test_an_unknown_channel_or_an_impossible_directory_is_a_settings_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there are shm, cuda_ipc, zmq, relay, collective, disk"):
        sender("pigeon")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="can't make its directory"):
        sender("disk", tmp_path / "file" / "below")


def test_an_engine_names_only_channels_that_its_device_and_its_ranks_can_read() -> None:
    assert readable_channels(has_gpu=True) == [*CHANNELS]
    assert readable_channels(has_gpu=False) == ["shm", "zmq", "relay", "collective", "disk"]
    assert readable_channels(has_gpu=True, ranks=2) == ["shm", "zmq", "disk"]


def test_whatever_needs_a_gpu_stays_on_its_host_and_carries_no_patches() -> None:
    channels = [weight_channel(name) for name in CHANNELS]
    on_gpu = [channel for channel in channels if channel.needs_gpu]
    assert on_gpu
    assert all(channel.one_host and not channel.carries_patches for channel in on_gpu)


def test_no_other_code_decides_by_the_name_of_a_channel() -> None:
    """What a channel can do is declared with it; engine/external/ has the servers' own methods."""
    for folder in ("orchestrator", "engine", "simulation", "observability"):
        for path in (ROOT / folder).rglob("*.py"):
            if "external" in path.parts:
                continue
            compared = {
                constant.value
                for node in ast.walk(ast.parse(path.read_text()))
                if isinstance(node, ast.Compare | ast.MatchValue)
                for constant in ast.walk(node)
                if isinstance(constant, ast.Constant)
            }
            assert not compared & set(CHANNELS), path
