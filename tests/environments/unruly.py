"""Environments and tools that misbehave on request, and some that do not."""

import asyncio
import ctypes
import os
import random
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from tidegate import Observation


class Walk:
    """A random walk: any action takes one step. Its text includes its process id."""

    def __init__(self, length: int = 3) -> None:
        self._length = length

    def reset(self, *, seed: int, task: Any) -> Observation:
        self._numbers = random.Random(seed)
        self._path: list[str] = []
        return Observation(f"{seed} {task}: ")

    def step(self, action: str) -> Observation:
        self._path.append(f"{action}{self._numbers.randrange(10)}")
        is_done = len(self._path) >= self._length
        return Observation(" ".join(self._path), reward=0.5, done=is_done)

    def close(self) -> None:
        pass


class AsyncWalk(Walk):
    """Walk with an asynchronous step."""

    async def step(self, action: str) -> Observation:  # type: ignore[override]
        await asyncio.sleep(0.0 if action != "hang" else 3600.0)
        return super().step(action)


class Unruly(Walk):
    """Walk that does what the action says; an unknown action is a step."""

    def __init__(self, marker: str | None = None) -> None:
        super().__init__(length=100)
        self._marker = None if marker is None else Path(marker)

    def step(self, action: str) -> Any:
        match action:
            case "exit":
                os._exit(7)
            case "sys.exit":
                sys.exit("enough")
            case "segfault":
                ctypes.string_at(0)
            case "hang":
                time.sleep(3600.0)
            case "hang with a child":
                assert self._marker is not None
                child = subprocess.Popen(["sleep", "3600"])
                self._marker.write_text(f"{os.getpid()} {child.pid}")
                time.sleep(3600.0)
            case "daemons":
                self._start_daemons()
            case "daemons, then exit":
                self._start_daemons()
                os._exit(7)
            case "daemons, then hang":
                self._start_daemons()
                time.sleep(3600.0)
            case "raise":
                raise LookupError("no such door")
            case "memory":
                return bytearray(1 << 40)
            case "wrong type":
                return 1.0
            case "nan":
                return Observation("", reward=float("nan"))
            case "unsendable":
                return Observation("", messages=({"content": object()},))
            case "print":
                sys.stdout.write("\x00\xff garbage " * 100_000)
                os.write(1, b"\xff" * 100_000)
            case "scribble":
                for descriptor in range(3, 512):
                    with suppress(OSError):
                        os.write(descriptor, b"\xff" * 100)
        return super().step(action)

    def _start_daemons(self) -> None:
        """Start two processes that left session, parent and environment behind, see daemon(7)."""
        assert self._marker is not None
        for number in range(2):
            if not os.fork():
                os.setsid()
                if os.fork():
                    os._exit(0)
                part = Path(f"{self._marker}.{number}.part")
                part.write_text(str(os.getpid()))
                part.rename(f"{self._marker}.{number}")
                os.execve("/bin/sleep", ["sleep", "3600"], {})
            os.wait()
            while not Path(
                f"{self._marker}.{number}"
            ).exists():  # otherwise it would be killed first
                time.sleep(0.01)

    def close(self) -> None:
        if self._marker is not None:
            self._marker.write_text("closed")


class Variables(Walk):
    """Walk whose text lists the process's environment variables."""

    def reset(self, *, seed: int, task: Any) -> Observation:
        return Observation(" ".join(f"{name}={value}" for name, value in os.environ.items()))


class Fickle(Walk):
    """Walk with randomness that does not come from the seed."""

    def reset(self, *, seed: int, task: Any) -> Observation:
        return super().reset(seed=os.getpid(), task=task)


def fails() -> Walk:
    raise RuntimeError("no licence")


# ---------------------------------------------------------------- tools


def add(left: int, right: int = 1) -> int:
    """The sum of two whole numbers."""
    return left + right


async def wait(seconds: float) -> str:
    """Answers late."""
    await asyncio.sleep(seconds)
    return "awake"


def misbehave(how: str) -> str:
    """Does it."""
    Unruly().step(how)
    return "done"


def takes_anything(*things: int) -> None:
    """No tool."""
