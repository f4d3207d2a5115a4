"""Tests of CURVE authentication: only allowed keys connect, and all others learn why not."""

import contextlib
import shutil
import socket as posix
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
import zmq
from typer.testing import CliRunner
from zmq.utils.monitor import recv_monitor_message

import tidegate
from tests.models import make_model_directory
from tests.transport.conftest import WAIT_S, Inbox
from tidegate.cli import app
from tidegate.errors import ConfigError
from tidegate.orchestrator.settings.config import run_settings
from tidegate.transport.dealer import DealerSocket
from tidegate.transport.messages import Ack, TurnsPaused, TurnsResumed, encode
from tidegate.transport.router import RouterSocket
from tidegate.transport.security import (
    EngineKeys,
    make_keys,
    read_allowed,
    read_engine_keys,
    read_orchestrator_keys,
    secure_listener,
)

pytestmark = pytest.mark.wire


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    make_keys(tmp_path / "keys")
    return tmp_path / "keys"


@pytest.fixture
def listener(keys: Path) -> Iterator[RouterSocket]:
    router = RouterSocket("tcp://127.0.0.1:*", name="test", keys=read_orchestrator_keys(keys))
    yield router
    router.close()


def strangers_keys(directory: Path, orchestrator: bytes) -> EngineKeys:
    """Create valid keys that are not on the allowed list."""
    own = read_engine_keys(make_keys(directory))
    return EngineKeys(own.public, own.secret, orchestrator)


def await_refusal(dealer: DealerSocket) -> str:
    deadline_s = time.monotonic() + WAIT_S
    while time.monotonic() < deadline_s:
        dealer.receive(0.02)
        dealer.connection()
        if (why := dealer.refusal()) is not None:
            return why
    raise AssertionError(f"not refused within {WAIT_S} s")


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s, f"not so within {WAIT_S} s"


# ------------------------------------------------------------------------------ files


def test_secrets_are_this_users_alone_and_apart_from_what_is_public(keys: Path) -> None:
    for path in [keys, *keys.rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    for path in keys.rglob("*.key"):
        assert "secret-key" not in path.read_text()
    assert [path.name for path in sorted((keys / "engine").iterdir())] == [
        "engine.key_secret",
        "orchestrator.key",
    ]


def test_keys_are_never_replaced_but_engines_can_be_added(keys: Path) -> None:
    before = {path: path.read_bytes() for path in keys.rglob("*") if path.is_file()}
    with pytest.raises(ConfigError, match="engine exists already, and keys are not replaced"):
        make_keys(keys)
    own = read_engine_keys(make_keys(keys, "host-b"))
    assert own.orchestrator == read_orchestrator_keys(keys).public
    assert sorted(read_allowed(keys / "engines").values()) == ["engine", "host-b"]
    assert before == {path: path.read_bytes() for path in before}


@pytest.mark.parametrize("name", ["", "../x", "a/b", "engines", ".hidden", "x" * 64])
def test_a_name_that_would_lead_elsewhere_is_refused(keys: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="can't name an engine's keys"):
        make_keys(keys, name)


def test_no_secret_is_shown_where_keys_are_printed(keys: Path) -> None:
    orchestrator, engine = read_orchestrator_keys(keys), read_engine_keys(keys / "engine")
    assert orchestrator.secret.decode() not in repr(orchestrator)
    assert engine.secret.decode() not in repr(engine)


def spoil(path: Path, change: Callable[[str], str]) -> None:
    path.write_text(change(path.read_text()))


SPOILT: list[tuple[str, Callable[[Path], object], str]] = [
    ("orchestrator.key_secret", lambda p: p.chmod(0o640), "others may read .* chmod go-rwx"),
    ("orchestrator.key_secret", lambda p: p.unlink(), "can't read .*`tidegate keys DIRECTORY`"),
    ("orchestrator.key_secret", lambda p: p.write_text(""), "holds no key that can be read"),
    ("orchestrator.key_secret", lambda p: p.write_bytes(b"\xff" * 9), "no key that can be read"),
    ("orchestrator.key_secret", lambda p: p.write_bytes(b"x" * 5000), "is no file of keys"),
    ("orchestrator.key_secret", lambda p: spoil(p, lambda s: s.replace("secret", "s")), "no secre"),
    ("orchestrator.key_secret", lambda p: spoil(p, lambda s: s[:-7] + '"'), "40 characters, not"),
    ("engines", lambda p: p.chmod(0o770), "others may change .*engines .mode 770.*chmod go-w"),
    ("engines", lambda p: shutil.rmtree(p), "engines"),
    ("engines/engine.key", lambda p: p.chmod(0o606), "others may change"),
    ("engines/engine.key", lambda p: p.write_text('public-key = "x"'), "no key that can be read"),
    ("engine/engine.key_secret", lambda p: p.chmod(0o604), "others may read"),
    ("engine/orchestrator.key", lambda p: p.unlink(), "can't read"),
    ("engine/orchestrator.key", lambda p: p.chmod(0o622), "others may change"),
]


@pytest.mark.parametrize(("name", "damage", "why"), SPOILT)
def test_keys_that_are_damaged_or_open_to_others_are_refused_with_a_remedy(
    keys: Path, name: str, damage: Callable[[Path], object], why: str
) -> None:
    damage(keys / name)
    with pytest.raises(ConfigError, match=why):
        run_settings(model="m", curve_key_directory=keys)


def test_a_public_key_that_is_not_the_secrets_is_noticed(keys: Path, tmp_path: Path) -> None:
    other = read_orchestrator_keys(keys).public.decode()
    make_keys(tmp_path / "others")
    mine = read_orchestrator_keys(tmp_path / "others").public.decode()
    spoil(tmp_path / "others" / "orchestrator.key_secret", lambda s: s.replace(mine, other))
    with pytest.raises(ConfigError, match="does not belong to its secret key"):
        read_orchestrator_keys(tmp_path / "others")


def test_the_command_says_what_goes_where_and_refuses_to_do_it_twice(tmp_path: Path) -> None:
    runner = CliRunner()
    made = runner.invoke(app, ["keys", str(tmp_path / "keys"), "--engine", "gpu-1"])
    assert made.exit_code == 0
    assert f"scp -pr {tmp_path}/keys/gpu-1 HOST:" in made.output
    assert "--curve-key-directory gpu-1 --connect" in made.output
    assert isinstance(
        runner.invoke(app, ["keys", str(tmp_path / "keys"), "--engine", "gpu-1"]).exception,
        ConfigError,
    )


# ------------------------------------------------------------------------------ settings


def test_a_run_beyond_this_host_needs_keys_and_weights_that_get_there(keys: Path) -> None:
    def settings(**values: object) -> object:
        return run_settings(model="m", engines=0, listen_address="tcp://0.0.0.0:5555", **values)

    with pytest.raises(ConfigError, match="needs keys: make them with `tidegate keys DIRECTORY`"):
        settings()
    with pytest.raises(ConfigError, match="weight_channel='shm' reaches engines on this host only"):
        settings(curve_key_directory=keys)
    assert settings(curve_key_directory=keys, weight_channel="disk", run_directory=keys)


def test_engines_that_the_run_starts_need_keys_too(keys: Path) -> None:
    shutil.rmtree(keys / "engine")
    assert run_settings(
        model="m", engines=0, listen_address="tcp://127.0.0.1:5555", curve_key_directory=keys
    )
    with pytest.raises(ConfigError, match=r"can't read .*engine\.key_secret"):
        run_settings(model="m", engines=1, curve_key_directory=keys)


# ------------------------------------------------------------------------------ connections


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:*", None], ids=["tcp", "ipc"])
async def test_with_the_right_keys_messages_go_both_ways(keys: Path, address: str | None) -> None:
    router = RouterSocket(address, name="test", keys=read_orchestrator_keys(keys))
    inbox = Inbox(router)
    engine = read_engine_keys(keys / "engine")
    with closing(router), closing(DealerSocket(router.address, b"a", keys=engine)) as dealer:
        dealer.send(TurnsPaused(mode="keep"))
        assert await inbox.wait_for(1) == [(b"a", encode(TurnsPaused(mode="keep")))]
        assert router.send(b"a", Ack(seq=3))
        assert dealer.receive(WAIT_S) == [Ack(seq=3)]
        assert dealer.refusal() is None
        assert router.statistics().refused_connections == 0


def test_a_peer_without_an_allowed_key_is_rejected_counted_and_gets_the_missing_key(
    keys: Path, listener: RouterSocket, tmp_path: Path
) -> None:
    stranger = strangers_keys(tmp_path / "others", read_orchestrator_keys(keys).public)
    with closing(DealerSocket(listener.address, b"a", keys=stranger)) as dealer:
        dealer.send(TurnsResumed())
        why = await_refusal(dealer)
        assert f"does not know this engine's key, {stranger.public.decode()}" in why
        until(lambda: listener.statistics().refused_connections == 1)
        assert not listener._socket.poll(0)


@pytest.mark.parametrize("has_keys", [True, False])
def test_without_keys_or_with_another_runs_no_peer_connects(
    listener: RouterSocket, tmp_path: Path, has_keys: bool
) -> None:
    others = read_engine_keys(make_keys(tmp_path / "others")) if has_keys else None
    with closing(DealerSocket(listener.address, b"a", keys=others)) as dealer:
        dealer.send(TurnsResumed())
        why = await_refusal(dealer)
        assert ("has others, or none" if has_keys else "most likely it needs keys") in why
        until(lambda: listener.statistics().refused_connections > 0)
        assert not listener._socket.poll(0)


def test_an_engine_with_keys_connects_to_no_orchestrator_without_keys(keys: Path) -> None:
    router = RouterSocket("tcp://127.0.0.1:*", name="test")
    engine = read_engine_keys(keys / "engine")
    with closing(router), closing(DealerSocket(router.address, b"a", keys=engine)) as dealer:
        dealer.send(TurnsResumed())
        assert "has others, or none" in await_refusal(dealer)
        assert not router._socket.poll(0)


READY = b"\x04\x1c\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
HANDSHAKES_WITHOUT_KEYS = {
    "ZMTP 1": b"\x01\x00\x06\x00hello",
    "ZMTP 2": b"\xff" + bytes(7) + b"\x01\x7f\x01\x05\x00\x00\x00\x05hello",
    "ZMTP 3 NULL": b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48) + READY + b"\x00\x05hello",
}


@pytest.mark.parametrize("version", HANDSHAKES_WITHOUT_KEYS)
async def test_no_older_protocol_gets_past_the_keys(
    keys: Path, listener: RouterSocket, version: str
) -> None:
    inbox = Inbox(listener)
    port = int(listener.address.rpartition(":")[2])
    with posix.create_connection(("127.0.0.1", port)) as raw:
        raw.sendall(HANDSHAKES_WITHOUT_KEYS[version])
        raw.settimeout(WAIT_S)
        with contextlib.suppress(ConnectionError):
            while raw.recv(256):  # at most its own greeting, then the end
                pass
    engine = read_engine_keys(keys / "engine")
    with closing(DealerSocket(listener.address, b"a", keys=engine)) as dealer:
        dealer.send(TurnsResumed())
        assert await inbox.wait_for(1) == [(b"a", encode(TurnsResumed()))]


async def test_the_list_of_keys_holds_from_the_next_connection_on(
    keys: Path, listener: RouterSocket
) -> None:
    inbox = Inbox(listener)
    file = keys / "engines" / "engine.key"
    engine = read_engine_keys(keys / "engine")
    with closing(DealerSocket(listener.address, b"a", keys=engine)) as first:
        first.send(TurnsResumed())
        await inbox.wait_for(1)
        shutil.move(file, keys / "engine.key")
        with closing(DealerSocket(listener.address, b"b", keys=engine)) as second:
            assert "does not know this engine's key" in await_refusal(second)
        first.send(TurnsResumed())  # established connections stay open
        await inbox.wait_for(2)
    shutil.move(keys / "engine.key", file)
    with closing(DealerSocket(listener.address, b"c", keys=engine)) as third:
        third.send(TurnsResumed())
        assert (await inbox.wait_for(3))[2][0] == b"c"


async def test_while_the_list_cannot_be_read_no_peer_connects_and_afterwards_they_do(
    keys: Path, listener: RouterSocket, caplog: pytest.LogCaptureFixture
) -> None:
    inbox = Inbox(listener)
    (keys / "engines" / "engine.key").chmod(0o666)
    engine = read_engine_keys(keys / "engine")
    with closing(DealerSocket(listener.address, b"a", keys=engine)) as dealer:
        dealer.send(TurnsResumed())
        until(lambda: listener.statistics().refused_connections > 0)
        assert inbox.frames == []
        assert dealer.refusal() is None  # a temporary failure, to be retried
    (keys / "engines" / "engine.key").chmod(0o600)
    with closing(DealerSocket(listener.address, b"b", keys=engine)) as dealer:
        dealer.send(TurnsResumed())
        await inbox.wait_for(1)
    assert "every peer is refused: others may change" in caplog.text


def test_without_an_authenticator_a_listener_with_keys_accepts_no_peer(keys: Path) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        secure_listener(socket, read_orchestrator_keys(keys))
        monitor = socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        )
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        engine = read_engine_keys(keys / "engine")
        with closing(DealerSocket(f"tcp://127.0.0.1:{port}", b"a", keys=engine)) as dealer:
            dealer.send(TurnsResumed())
            assert monitor.poll(int(WAIT_S * 1000))
            event = recv_monitor_message(monitor)["event"]
            assert event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
            assert not socket.poll(0)
        socket.disable_monitor()
        monitor.close()


def test_a_whole_run_over_encrypted_connections(keys: Path, tmp_path: Path) -> None:
    async def episode(episode: tidegate.Episode, task: int) -> float:
        episode.append([task % 40 + 1, 2, 3])
        await episode.generate(max_tokens=4)
        return float(task % 2)

    model = make_model_directory(tmp_path / "model")
    with tidegate.serve_sync(
        model=model,
        engines=1,
        group_size=2,
        groups_per_batch=1,
        listen_address="tcp://127.0.0.1:*",
        curve_key_directory=keys,
    ) as rollouts:
        batch = next(iter(rollouts.batches(range(8), episode=episode)))
        assert batch.loss_mask.sum() == 8
