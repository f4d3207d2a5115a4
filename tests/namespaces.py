"""Simulated hosts on one machine: network namespaces on a bridge, with rate-limited links.

Needs root and the command ``ip``.
"""

import os
import shutil
import subprocess


def are_allowed() -> bool:
    """Return whether this process may create namespaces and links."""
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
    """A bridge that includes this process, and hosts behind a link each; a context manager."""

    def __init__(self, hosts: int, *, link_mbit_per_s: int | None = None) -> None:
        """``link_mbit_per_s`` limits each link, this process's included, in either direction."""
        number = os.getpid() % 200 + 20
        self._prefix = f"tg{os.getpid() % 100_000}"
        self._bridge = f"{self._prefix}b"
        self._subnet = f"10.231.{number}"
        self._rate = link_mbit_per_s
        self.names = [f"{self._prefix}h{index}" for index in range(hosts)]
        """Names of the hosts' namespaces."""
        self.address = f"{self._subnet}.1"
        """IP address of this process on the bridge."""

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

    def __exit__(self, *exception: object) -> None:
        self.remove()

    def command(self, host: int, *command: str) -> list[str]:
        """Return a command line that runs in a host."""
        return ["ip", "netns", "exec", self.names[host], *command]

    def cut(self, host: int) -> None:
        """Drop all packets of a host silently, unlike a link set down, which both ends notice."""
        _ip("link", "set", f"{self.names[host]}o", "nomaster")

    def mend(self, host: int) -> None:
        """Undo :meth:`cut`."""
        _ip("link", "set", f"{self.names[host]}o", "master", self._bridge)

    def remove(self) -> None:
        """Remove all namespaces and links. Idempotent."""
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
