"""Builds and loads the C++ kernels beside these files, once per machine, on first use.

Building targets this machine's processor, takes some seconds and a C++ compiler, and needs no torch
headers. The library is cached under ``$XDG_CACHE_HOME/tidegate``; without a compiler callers fall
back to torch.
"""

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import stat
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy.typing as npt
import torch

COMPILER = os.environ.get("CXX", "g++")

SOURCE_NAMES = (
    "native.cpp",
    "attend_last.cpp",
    "weight_matrix.cpp",
    "exact_matrix.cpp",
    "layers.cpp",
)

SOURCES = tuple(Path(__file__).with_name(name) for name in SOURCE_NAMES)

HEADER_NAMES = ("numbers.h", "panels.h", "packing.h", "products.h", "functions.h")

HEADERS = tuple(Path(__file__).with_name(name) for name in HEADER_NAMES)

FLAGS = (
    "-O3",
    "-march=native",
    "-std=c++17",
    "-fPIC",
    "-shared",
    "-pthread",
    # Needed to vectorise std::floor and comparisons; results do not change.
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=off",
)

BUILD_TIMEOUT_S = 300.0

STDERR_BYTES_SHOWN = 500
"""Length to which a failed compiler's stderr is cut; the first error is usually enough."""

PROCESSOR_LINES = ("flags", "Features", "CPU part")
"""Lines of /proc/cpuinfo that name the processor's capabilities, on x86 and ARM."""

log = logging.getLogger("tidegate")

DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
"""Dtypes that functions are compiled for, with the suffixes of their names."""

POINTER, INT, FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the compiled library; None if it cannot be built."""
    try:
        directory = _cache_directory()
        name = f"native-{_fingerprint()}.so"
        if directory is not None:
            return _load(directory / name)
        with tempfile.TemporaryDirectory(prefix="tidegate.") as directory_name:
            return _load(Path(directory_name) / name)  # once loaded, it needs no file
    except (OSError, RuntimeError, ValueError, subprocess.SubprocessError) as error:
        stderr = getattr(error, "stderr", None) or b""
        reason = f"{error} {stderr[:STDERR_BYTES_SHOWN].decode(errors='replace')}"
        log.warning("compiled code=none: engines use torch's operators. %s", reason)
        return None


def function(
    functions: ctypes.CDLL, name: str, arguments: Sequence[Any], dtype: torch.dtype | None = None
) -> Callable[..., int]:
    """Return a compiled function, for ``dtype`` if there is one per dtype.

    It raises MemoryError if it cannot allocate its working memory.
    """
    compiled = functions[name if dtype is None else f"{name}_{DTYPES[dtype]}"]
    compiled.argtypes, compiled.restype = arguments, INT
    compiled.errcheck = _raise_if_out_of_memory  # type: ignore[assignment]  # of any result, so of an int
    return compiled


def address(column: npt.NDArray[Any]) -> int:
    """Return the address of a column's data, in a third of the time of ``column.ctypes.data``."""
    return ctypes.addressof(ctypes.c_char.from_buffer(column.data))


def _raise_if_out_of_memory(is_out_of_memory: int, called: object, arguments: object) -> int:
    if is_out_of_memory:
        raise MemoryError(
            "compiled code could not allocate its working memory; start fewer engines, or lower "
            "max_running_turns"
        )
    return is_out_of_memory


@functools.cache
def processor() -> str:
    """Return the processor's capability flags."""
    with Path("/proc/cpuinfo").open() as lines:
        return "".join(line for line in lines if line.startswith(PROCESSOR_LINES))[:4096]


def _load(path: Path) -> ctypes.CDLL:
    if path.exists() and _is_private(path):
        try:
            return ctypes.CDLL(str(path))
        except OSError:  # damaged, or the home is shared with a machine with other system libraries
            log.warning("compiled code: %s cannot be loaded; compiling it again", path)
    _build(path)
    return ctypes.CDLL(str(path))


def _build(path: Path) -> None:
    """Compile beside ``path`` and rename, so that engines that start together never
    see half a file."""
    with tempfile.TemporaryDirectory(dir=path.parent) as directory:
        built = Path(directory) / path.name
        command = [*shlex.split(COMPILER), *FLAGS, *map(str, SOURCES), "-o", str(built)]
        subprocess.run(command, check=True, capture_output=True, timeout=BUILD_TIMEOUT_S)
        built.chmod(stat.S_IRWXU)
        built.replace(path)


def _fingerprint() -> str:
    texts = [path.read_text() for path in (*SOURCES, *HEADERS)]
    machine = platform.processor() + platform.machine() + processor()
    parts = (*texts, " ".join(FLAGS), COMPILER, machine)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _cache_directory() -> Path | None:
    """Return the cache directory. None if there is none, or if other users could write to it, whose
    code would run as this user; then every engine compiles for itself."""
    try:
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        path = Path(home) / "tidegate"
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not os.access(path, os.W_OK | os.X_OK):
            raise PermissionError(f"{path} can't be written to")
        if not _is_private(path):
            raise PermissionError(f"{path} belongs to another user, or others may write to it")
    except (OSError, RuntimeError) as error:
        log.warning(
            "compiled code is not cached, so each engine compiles it when it starts: %s", error
        )
        return None
    return path


def _is_private(path: Path) -> bool:
    """Return whether only this user can have written to ``path``."""
    status = path.stat()
    others_write = stat.S_IWGRP | stat.S_IWOTH
    return status.st_uid == os.geteuid() and not status.st_mode & others_write
