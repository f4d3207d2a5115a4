"""Tests of the ZeroMQ weight channel over broken networks, dying senders, and with keys."""

import itertools
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import msgpack
import msgspec
import pytest
import zmq

from tests.transport.conftest import stranger_socket
from tests.transport.weight_ends import ORCHESTRATOR, RECEIVER_CONFIG, as_bytes, tensors
from tidegate.errors import WeightsRefused
from tidegate.transport.messages import InitWeights, TensorSpec, UpdateWeights
from tidegate.transport.security import make_keys, read_engine_keys, read_orchestrator_keys
from tidegate.transport.weight_channels import (
    NamedBuffer,
    WeightReceiverConfig,
    receiver,
)
from tidegate.transport.weight_channels import zmq as zmq_channel
from tidegate.transport.weight_channels.zmq import (
    CHUNK_BYTES,
    CHUNKS_AHEAD,
    SendableMemory,
    ZmqSender,
)

pytestmark = pytest.mark.wire

WAIT_S = 30.0


@pytest.fixture
def weights() -> Iterator[ZmqSender]:
    sender = ZmqSender(ORCHESTRATOR)
    yield sender
    sender.close()
    sender.close()


def fetched(
    init: InitWeights, update: UpdateWeights, config: WeightReceiverConfig = RECEIVER_CONFIG
) -> dict[str, bytes]:
    with closing(receiver(init, config)) as end:
        return {spec.name: bytes(view) for spec, view in end.tensors(update)}


# ------------------------------------------------------------------------------ transfer


@pytest.mark.parametrize(
    "address", [ORCHESTRATOR, "tcp://[::1]:5555", "ipc:///tmp/elsewhere", None]
)
def test_weights_of_any_size_come_from_beside_the_orchestrators_address(
    address: str | None,
) -> None:
    weights = ZmqSender(address)
    sizes = [1, 0, CHUNK_BYTES - 1, CHUNK_BYTES, 3, (CHUNKS_AHEAD + 2) * CHUNK_BYTES + 1]
    [update] = weights.write(1, sent := tensors(*sizes))
    assert fetched(weights.init(), update, WeightReceiverConfig(address or "")) == as_bytes(sent)
    weights.close()


def test_each_tensor_is_available_before_the_next_has_arrived(weights: ZmqSender) -> None:
    [update] = weights.write(1, tensors(5, 20 * CHUNK_BYTES))
    end = receiver(weights.init(), RECEIVER_CONFIG)
    arriving = end.tensors(update)
    spec, _ = next(arriving)
    weights.close()
    assert spec.name == "w0"
    end.close()


def test_the_version_kept_is_served_beside_the_newest_and_no_other(weights: ZmqSender) -> None:
    first, second, third = (tensors(1000 * n) for n in (1, 2, 3))
    [one] = weights.write(1, first)
    [two] = weights.write(2, second, keep=[1])
    assert fetched(weights.init(), one) == as_bytes(first)
    assert fetched(weights.init(), two) == as_bytes(second)
    [three] = weights.write(3, third, keep=[1])
    assert fetched(weights.init(), one) == as_bytes(first)
    assert fetched(weights.init(), three) == as_bytes(third)
    with pytest.raises(WeightsRefused, match="not in the sender's memory"):
        fetched(weights.init(), two)


def test_a_version_that_is_written_again_is_not_taken_for_what_it_was(weights: ZmqSender) -> None:
    [old] = weights.write(1, tensors(10))
    [new] = weights.write(1, again := tensors(10))
    assert fetched(weights.init(), new) == as_bytes(again)
    with pytest.raises(WeightsRefused, match="not in the sender's memory"):
        fetched(weights.init(), old)


def test_memory_is_used_again_at_both_ends(weights: ZmqSender) -> None:
    end = receiver(weights.init(), RECEIVER_CONFIG)
    sent, received = set(), set()
    for version, size in enumerate([5000, 5000, 3000, 5000]):
        [update] = weights.write(version, tensors(size))
        [(_, view)] = end.tensors(update)
        sent.add(weights._stored[-1].memory.bytes.ctypes.data)
        received.add(id(view.obj))
    assert (len(sent), len(received)) == (1, 1)
    end.close()


MAPPED_FOR_CHUNKS = """
import ctypes, sys
from tidegate.transport.messages import InitWeights
from tidegate.transport.weight_channels import WeightReceiverConfig, receiver
from tidegate.transport.weight_channels.zmq import SendableMemory
from tidegate.transport.weight_channels.zmq import CHUNK_BYTES, CHUNKS_AHEAD

class Statistics(ctypes.Structure):
    _fields_ = [(f"field_{n}", ctypes.c_size_t) for n in range(10)]

libc = ctypes.CDLL(None)
if not hasattr(libc, "mallinfo2"):
    sys.exit("this is no glibc of 2.33 or later")
libc.mallinfo2.restype, libc.malloc.restype = Statistics, ctypes.c_void_p
info = {"address": "tcp://*:1"}
end = receiver(InitWeights(channel="zmq", info=info), WeightReceiverConfig(sys.argv[1]))
before = libc.mallinfo2().field_3
libc.malloc(ctypes.c_size_t(CHUNKS_AHEAD * CHUNK_BYTES - 4096))
print(libc.mallinfo2().field_3 - before)
end.close()
"""


def test_memory_of_chunks_is_the_heaps_and_so_not_fresh_for_each() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", MAPPED_FOR_CHUNKS, ORCHESTRATOR], capture_output=True, text=True
    )
    if "no glibc" in ended.stderr:
        pytest.skip(ended.stderr)
    assert ended.stdout == "0\n", "blocks that the C library maps from the system, and gives back"


def test_a_chunk_is_made_a_frame_once_and_shows_what_is_written_since() -> None:
    memory = SendableMemory(3 * CHUNK_BYTES)
    frame = memory.frame(CHUNK_BYTES, 2 * CHUNK_BYTES)
    memory.bytes[CHUNK_BYTES] = 7
    assert memory.frame(CHUNK_BYTES, 2 * CHUNK_BYTES) is frame
    assert frame.buffer[0] == 7
    assert memory.frame(CHUNK_BYTES, CHUNK_BYTES + 5).bytes == bytes(memory.bytes[CHUNK_BYTES:][:5])
    assert memory.frame(1, 1 + CHUNK_BYTES).bytes == bytes(memory.bytes[1:][:CHUNK_BYTES])


# ------------------------------------------------------------------------------ broken networks


class BreakingNetwork:
    """A proxy that cuts each of its first connections after a number of bytes."""

    def __init__(self, port: int, *, bytes_before_cut: list[int]) -> None:
        self._port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.init = InitWeights(
            channel="zmq", info={"address": f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"}
        )
        self.cuts = 0
        self._budgets = itertools.chain(bytes_before_cut, itertools.repeat(1 << 60))
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _serve(self) -> None:
        for budget in self._budgets:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection(("127.0.0.1", self._port))
            threading.Thread(target=self._pump, args=(near, far, 1 << 60), daemon=True).start()
            self._pump(far, near, budget)
            self.cuts += 1

    @staticmethod
    def _pump(source: socket.socket, target: socket.socket, budget: int) -> None:
        try:
            while budget > 0 and (data := source.recv(min(budget, 1 << 16))):
                target.sendall(data)
                budget -= len(data)
        except OSError:
            pass
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)  # also wakes the thread that reads from it
            end.close()


def test_a_transfer_whose_connection_is_cut_continues_where_it_was(weights: ZmqSender) -> None:
    port = int(weights.address.rpartition(":")[2])
    network = BreakingNetwork(port, bytes_before_cut=[3 * CHUNK_BYTES, 100, CHUNK_BYTES // 2])
    [update] = weights.write(1, sent := tensors(*[2 * CHUNK_BYTES + 17] * 4))
    assert fetched(network.init, update) == as_bytes(sent)
    assert network.cuts >= 3
    network.close()


SENDER = """
import sys
from tidegate.transport.messages import encode
from tidegate.transport.weight_channels import NamedBuffer
from tidegate.transport.weight_channels.zmq import ZmqSender

sender = ZmqSender("tcp://127.0.0.1:5555")
size = int(sys.argv[1])
tensors = [NamedBuffer(name, "uint8", (size,), memoryview(bytes(size))) for name in "ab"]
for message in (sender.init(), *sender.write(1, tensors)):
    print(encode(message).hex(), flush=True)
sys.stdin.read()
"""


def test_a_sender_that_dies_in_the_midst_is_an_error_after_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(zmq_channel, "STALL_TIMEOUT_S", 1.0)
    process = subprocess.Popen(
        [sys.executable, "-c", SENDER, str(16 * CHUNK_BYTES)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    lines = [bytes.fromhex(process.stdout.readline()) for _ in range(2)]
    init = msgspec.msgpack.decode(lines[0], type=InitWeights)
    update = msgspec.msgpack.decode(lines[1], type=UpdateWeights)
    end = receiver(init, RECEIVER_CONFIG)
    arriving = end.tensors(update)
    assert next(arriving)[0].name == "a"
    process.kill()
    process.communicate(timeout=60)
    with pytest.raises(WeightsRefused, match=r"no weights arrived .* for 1 s.* missing"):
        next(arriving)
    end.close()


def test_without_an_answer_it_is_an_error_after_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmq_channel, "STALL_TIMEOUT_S", 0.3)
    end = receiver(
        InitWeights(channel="zmq", info={"address": "ipc:///tmp/nobody"}), WeightReceiverConfig()
    )
    update = UpdateWeights(version=1, location="x", tensors=[TensorSpec("w", "uint8", [7], 0, 7)])
    with pytest.raises(WeightsRefused, match="7 bytes missing; is the orchestrator alive"):
        list(end.tensors(update))
    end.close()


def test_a_transfer_that_is_no_longer_wanted_ends_at_once() -> None:
    end = receiver(
        InitWeights(channel="zmq", info={"address": "ipc:///tmp/nobody"}), WeightReceiverConfig()
    )
    update = UpdateWeights(version=1, location="x", tensors=[TensorSpec("w", "uint8", [7], 0, 7)])
    started_s = time.monotonic()
    assert list(end.tensors(update, lambda: time.monotonic() < started_s + 0.2)) == []
    end.close()


def test_what_an_abandoned_transfer_had_asked_for_does_not_end_up_in_the_next(
    weights: ZmqSender,
) -> None:
    end = receiver(weights.init(), RECEIVER_CONFIG)
    for version in range(5):
        [update] = weights.write(version, sent := tensors(5, 3 * CHUNK_BYTES, 7))
        next(end.tensors(update))  # abandon the transfer after one tensor
    assert {spec.name: bytes(view) for spec, view in end.tensors(update)} == as_bytes(sent)
    end.close()


# ------------------------------------------------------------------------------ admission


def bare_dealer(address: str) -> "zmq.Socket[bytes]":
    bare = stranger_socket(zmq.DEALER)
    bare.connect(address.replace("*", "127.0.0.1"))
    return bare


def test_an_engine_in_any_language_can_ask(weights: ZmqSender) -> None:
    [update] = weights.write(1, [NamedBuffer("w", "uint8", (6,), memoryview(b"abcdef"))])
    with bare_dealer(weights.address) as bare:
        bare.send(msgpack.packb([update.location, 2, 5]))
        header, data = bare.recv_multipart()
        assert msgpack.unpackb(header)[:2] == [update.location, 2]
        assert data == b"cde"


@pytest.mark.parametrize(
    "request_frames",
    [
        [b""],
        [b"\xc1"],
        [msgpack.packb(["nowhere", 0, 5])],
        [msgpack.packb(["x" * 900, 0, 5])],
        [msgpack.packb(["{location}", -1, 5])],
        [msgpack.packb(["{location}", 5, 5])],
        [msgpack.packb(["{location}", 0, 7])],
        [msgpack.packb(["{location}", 0, 1 << 62])],
        [msgpack.packb(["{location}", 0, 5]), b"more"],
    ],
)
def test_an_invalid_request_gets_an_error_and_others_are_served(
    weights: ZmqSender, request_frames: list[bytes]
) -> None:
    [update] = weights.write(1, sent := tensors(6))
    frames = [
        msgpack.packb([update.location, *msgpack.unpackb(frame)[1:]])
        if b"{location}" in frame
        else frame
        for frame in request_frames
    ]
    with bare_dealer(weights.address) as bare:
        bare.send_multipart(frames)
        [answer] = bare.recv_multipart()
        _, _, refusal = msgpack.unpackb(answer)
        assert refusal
    assert fetched(weights.init(), update) == as_bytes(sent)


@pytest.mark.parametrize(
    "answer",
    [
        [b"\xc1"],
        [msgpack.packb(["{location}", 0, "out of order"])],
        [msgpack.packb(["{location}", 0]), b"short"],
        [msgpack.packb(["{location}", 0]), b"too long"],
        [msgpack.packb(["{location}", 0]), b"7 bytes", b"and more"],
    ],
)
def test_a_sender_that_makes_no_sense_is_refused(answer: list[bytes]) -> None:
    with stranger_socket(zmq.ROUTER) as strange:
        port = strange.bind_to_random_port("tcp://127.0.0.1")
        end = receiver(
            InitWeights(channel="zmq", info={"address": f"tcp://*:{port}"}), RECEIVER_CONFIG
        )
        spec = TensorSpec("w", "uint8", [7], 0, 7)
        arriving = end.tensors(UpdateWeights(version=1, location="{location}", tensors=[spec]))
        errors: list[str] = []

        def read() -> None:
            try:
                list(arriving)
            except WeightsRefused as error:
                errors.append(str(error))

        reading = threading.Thread(target=read)
        reading.start()
        peer, _ = strange.recv_multipart()
        strange.send_multipart([peer, *answer])
        reading.join(WAIT_S)
        assert len(errors) == 1
        end.close()


def test_with_keys_only_receivers_that_have_them_get_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zmq_channel, "STALL_TIMEOUT_S", 1.0)
    engine, stranger = make_keys(tmp_path / "ours"), make_keys(tmp_path / "theirs")
    own_keys = read_orchestrator_keys(tmp_path / "ours")
    weights = ZmqSender("tcp://0.0.0.0:5555", keys=own_keys)
    [update] = weights.write(1, sent := tensors(2 * CHUNK_BYTES))
    own, theirs = read_engine_keys(engine), read_engine_keys(stranger)
    assert fetched(weights.init(), update, WeightReceiverConfig(ORCHESTRATOR, own)) == as_bytes(
        sent
    )
    for keys in (None, theirs):
        with pytest.raises(WeightsRefused, match=r"rejected this engine.s keys|no weights arrived"):
            fetched(weights.init(), update, WeightReceiverConfig(ORCHESTRATOR, keys))
    weights.close()
