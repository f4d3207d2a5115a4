"""Tests of address validation: reachable by the right processes, and by no others."""

import socket
import stat
from pathlib import Path

import pytest

from tidegate.errors import AddressInUse, ConfigError
from tidegate.transport.addresses import (
    check_connector,
    check_listener,
    connectable_address,
    is_on_this_host,
)
from tidegate.transport.dealer import DealerSocket
from tidegate.transport.router import RouterSocket

pytestmark = pytest.mark.wire


@pytest.mark.parametrize(
    "address",
    ["ipc:///run/x", "ipc://@x", "tcp://127.0.0.1:5555", "tcp://127.8.9.1:1", "tcp://[::1]:5555"],
)
def test_addresses_on_this_host_need_no_keys(address: str) -> None:
    check_listener(address, has_keys=False)
    check_connector(address, has_keys=False)
    assert is_on_this_host(address)
    assert connectable_address(address) == address


BEYOND = ["tcp://192.168.1.7:5555", "tcp://[fe80::1]:5555", "tcp://localhost:5", "tcp://a-b.c_d:5"]
WILDCARDS = {
    "tcp://0.0.0.0:5555": "tcp://127.0.0.1:5555",
    "tcp://*:5555": "tcp://127.0.0.1:5555",
    "tcp://[::]:5555": "tcp://[::1]:5555",
}


@pytest.mark.parametrize("address", [*BEYOND, *WILDCARDS])
def test_addresses_beyond_this_host_are_served_with_keys_only(address: str) -> None:
    assert not is_on_this_host(address)
    check_listener(address, has_keys=True)
    for check in (check_listener, check_connector):
        with pytest.raises(ConfigError, match="reached from other hosts, so it needs keys"):
            check(address, has_keys=False)


@pytest.mark.parametrize("address", WILDCARDS)
def test_every_interface_is_where_to_listen_and_not_where_to_connect(address: str) -> None:
    with pytest.raises(ConfigError, match="is where to listen, on every interface"):
        check_connector(address, has_keys=True)
    check_connector(connectable_address(address), has_keys=True)
    assert connectable_address(address) == WILDCARDS[address]


def test_keys_are_not_taken_where_they_would_protect_nothing() -> None:
    with pytest.raises(ConfigError, match="joins threads of one process"):
        check_listener("inproc://x", has_keys=True)


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("tcp://0.0.0.0:5555", "reached from other hosts"),
        ("tcp://*:5555", "reached from other hosts"),
        ("tcp://192.168.1.7:5555", "reached from other hosts"),
        ("tcp://[::]:5555", "reached from other hosts"),
        ("tcp://localhost:5555", "reached from other hosts"),
        ("tcp://[::ffff:10.0.0.1]:5", "not tcp://HOST:PORT"),
        ("tcp://127.0.0.1", "not tcp://HOST:PORT"),
        ("tcp://127.0.0.1:http", "not tcp://HOST:PORT"),
        ("tcp://127.0.0.1:0", "a port is 1 to 65535"),
        ("tcp://127.0.0.1:65536", "a port is 1 to 65535"),
        ("tcp://127.0.0.1:1;tcp://10.0.0.1:1", "not tcp://HOST:PORT"),
        ("tcp://127.0.0.1;127.0.0.1:1", "not tcp://HOST:PORT"),
        ("tcp://127.0.0.\u0661:1", "not tcp://HOST:PORT"),
        ("ipc://relative/path", "relative path"),
        ("ipc://", "no address"),
        ("/run/x", "no address"),
        ("", "no address"),
        ("udp://127.0.0.1:5555", "unknown kind"),
    ],
)
def test_any_other_address_is_refused_with_its_fault(address: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        RouterSocket(address, name="test")


def test_an_engine_cannot_connect_to_an_open_port_or_another_host() -> None:
    with pytest.raises(ConfigError, match="leaves the port open"):
        DealerSocket("tcp://127.0.0.1:*", b"engine-0")
    with pytest.raises(ConfigError, match="reached from other hosts"):
        DealerSocket("tcp://10.0.0.1:5555", b"engine-0")


def test_a_port_that_is_taken_is_reported() -> None:
    first = RouterSocket("tcp://127.0.0.1:*", name="test")
    with pytest.raises(AddressInUse, match=first.address):
        RouterSocket(first.address, name="test")
    first.close()


@pytest.mark.parametrize("kind", ["path", "abstract"])
def test_a_living_listener_keeps_its_ipc_address(kind: str, tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/s" if kind == "path" else f"ipc://@{tmp_path}"
    first = RouterSocket(address, name="test")
    with pytest.raises(AddressInUse):
        RouterSocket(address, name="test")
    dealer = DealerSocket(address, b"engine-0")
    dealer.close()
    first.close()


@pytest.mark.parametrize("kind", ["ipc", "tcp"])
def test_an_address_is_free_as_soon_as_its_listener_is_closed(kind: str, tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/s" if kind == "ipc" else "tcp://127.0.0.1:*"
    for _ in range(50):
        router = RouterSocket(address, name="test")
        address = router.address
        router.close()
    assert list(tmp_path.iterdir()) == []


def test_a_path_left_behind_by_a_dead_process_is_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    assert path.exists()
    router = RouterSocket(f"ipc://{path}", name="test")
    assert router.address == f"ipc://{path}"
    router.close()


def test_a_path_that_cannot_be_bound_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        RouterSocket(f"ipc://{tmp_path}/missing/s", name="test")
    with pytest.raises(ConfigError, match="too long"):
        RouterSocket(f"ipc://{tmp_path}/{'x' * 200}", name="test")


def test_without_an_address_it_is_this_users_alone_and_leaves_nothing_behind() -> None:
    router = RouterSocket(None, name="a run/..\0é")
    directory = Path(router.address.removeprefix("ipc://")).parent
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert directory.name.startswith("tidegate-arun-")
    router.close()
    router.close()
    assert not directory.exists()


def test_inproc_addresses_join_two_ends_in_one_process() -> None:
    router = RouterSocket("inproc://x", name="test")
    dealer = DealerSocket(router.address, b"engine-0")
    dealer.close()
    router.close()
