"""How does the C++ beside these files become functions? It is compiled where it runs, once.

That happens for this machine's processor when an engine first wants it, and takes some seconds, a
C++ compiler and no headers of torch's. Knows nothing of what the functions compute.
"""

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import subprocess
import tempfile
from pathlib import Path

import torch

COMPILER = os.environ.get("CXX", "g++")

SOURCE_NAMES = ("native.cpp", "attend_last.cpp", "weight_matrix.cpp")

SOURCES = tuple(Path(__file__).with_name(name) for name in SOURCE_NAMES)

HEADER = Path(__file__).with_name("numbers.h")

FLAGS = (
    "-O3",
    "-march=native",
    "-std=c++17",
    "-fPIC",
    "-shared",
    "-pthread",
    # Vectors of std::floor and comparisons need these; results stay what the source says.
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=off",
)

BUILD_TIMEOUT_S = 300.0

STDERR_BYTES_SHOWN = 500
"""Of a compiler that fails; the first error says it."""

PROCESSOR_LINES = ("flags", "Features", "CPU part")
"""Of /proc/cpuinfo: what a processor can, as x86 and as ARM say it."""

log = logging.getLogger("tidegate")

DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
"""What functions come for, and how their names end."""

POINTER, INT, FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled functions; None where nothing can be compiled."""
    try:
        path = _cache_directory() / f"native-{_fingerprint()}.so"
        if not path.exists():
            _build(path)
        return ctypes.CDLL(str(path))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or b""
        why = f"{error} {said[:STDERR_BYTES_SHOWN].decode(errors='replace')}"
        log.warning("compiled code=none: engines compute by torch's alone. %s", why)
        return None


@functools.cache
def processor() -> str:
    """What the processor can, as its flags say."""
    with Path("/proc/cpuinfo").open() as lines:
        return "".join(line for line in lines if line.startswith(PROCESSOR_LINES))[:4096]


def _build(path: Path) -> None:
    """Compile beside ``path`` and rename: engines that start together don't see half a file."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(dir=path.parent) as directory:
        built = Path(directory) / path.name
        command = [*shlex.split(COMPILER), *FLAGS, *map(str, SOURCES), "-o", str(built)]
        subprocess.run(command, check=True, capture_output=True, timeout=BUILD_TIMEOUT_S)
        built.replace(path)


def _fingerprint() -> str:
    """Changes with the sources, the flags, the compiler and the processor."""
    texts = [path.read_text() for path in (*SOURCES, HEADER)]
    machine = platform.processor() + platform.machine() + processor()
    parts = (*texts, " ".join(FLAGS), COMPILER, machine)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _cache_directory() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "tidegate"
