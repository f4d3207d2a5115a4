"""Hosts with addresses and links of their own, on this machine: network namespaces on a bridge.

Needs root. It knows nothing of what runs in them.
"""

import os
import shutil
import subprocess
from types import TracebackType


def are_allowed() -> bool:
    """Whether this process may make namespaces and links."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    name = f"tgtry{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode:
        return False
    made = subprocess.run(
        ["ip", "link", "add", name[:13] + "a", "type", "bridge"], capture_output=True, check=False
    )
    subprocess.run(["ip", "link", "del", name[:13] + "a"], capture_output=True, check=False)
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return made.returncode == 0


class Network:
    """A bridge that this process is on, and hosts, each behind a link of its own."""

    def __init__(self, hosts: int, *, link_mbit_per_s: int | None = None) -> None:
        """``link_mbit_per_s``: what each link, this process's too, carries in either direction."""
        number = os.getpid() % 200 + 20
        self._prefix = f"tg{os.getpid() % 100_000}"
        self._bridge = f"{self._prefix}b"
        self._subnet = f"10.231.{number}"
        self._rate = link_mbit_per_s
        self.names = [f"{self._prefix}h{index}" for index in range(hosts)]
        """Of namespaces."""
        self.address = f"{self._subnet}.1"
        """This process's."""

    def __enter__(self) -> "Network":
        try:
            _ip("link", "add", self._bridge, "type", "bridge")
            _ip("addr", "add", f"{self.address}/24", "dev", self._bridge)
            _ip("link", "set", self._bridge, "up")
            self._limit([], self._bridge)
            for index, name in enumerate(self.names):
                self._add(index, name)
        except BaseException:
            self.remove()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.remove()

    def command(self, host: int, *command: str) -> list[str]:
        """That command line, in a host."""
        return ["ip", "netns", "exec", self.names[host], *command]

    def cut(self, host: int) -> None:
        """No packet comes or goes, and nobody is told, as they are of a link set down."""
        _ip("link", "set", f"{self.names[host]}o", "nomaster")

    def mend(self, host: int) -> None:
        """They do again."""
        _ip("link", "set", f"{self.names[host]}o", "master", self._bridge)

    def remove(self) -> None:
        """All of it. Harmless if repeated."""
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
            subprocess.run(["ip", "link", "del", f"{name}o"], capture_output=True, check=False)
        subprocess.run(["ip", "link", "del", self._bridge], capture_output=True, check=False)

    def _add(self, index: int, name: str) -> None:
        outer, inner = f"{name}o", f"{name}i"
        _ip("netns", "add", name)
        _ip("link", "add", outer, "type", "veth", "peer", "name", inner)
        _ip("link", "set", inner, "netns", name)
        _ip("link", "set", outer, "master", self._bridge, "up")
        _ip("-n", name, "addr", "add", f"{self._subnet}.{index + 2}/24", "dev", inner)
        _ip("-n", name, "link", "set", inner, "up")
        _ip("-n", name, "link", "set", "lo", "up")
        self._limit([], outer)
        self._limit(["-n", name], inner)

    def _limit(self, where: list[str], device: str) -> None:
        if self._rate is not None:
            shape = ["tbf", "rate", f"{self._rate}mbit", "burst", "256kb", "latency", "300ms"]
            subprocess.run(
                ["tc", *where, "qdisc", "add", "dev", device, "root", *shape], check=True
            )


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
