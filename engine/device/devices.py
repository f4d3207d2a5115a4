"""Resolves a ``--device`` name to a CUDA device, or refuses it with the reason.

``cpu`` resolves to None, because the CPU has its own runner.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tidegate.errors import ConfigError

CPU = "cpu"
"""Name of the CPU, which every machine has."""

NAMES = re.compile(r"cuda(:\d+)?")


def find_device(name: str) -> torch.device | None:
    """Return the device called ``cuda`` or ``cuda:N``; None for ``cpu``.

    Raises:
        ConfigError: there is no such device, or Triton is missing.
    """
    if name == CPU:
        return None
    if NAMES.fullmatch(name) is None:
        raise ConfigError(f"device must be 'cpu', 'cuda' (the first GPU) or 'cuda:N', got {name!r}")
    if not torch.cuda.is_available():
        raise ConfigError(
            f"device={name!r}: torch {torch.__version__} finds no CUDA device here; install a CUDA "
            f"build of torch and its driver, or set device to cpu"
        )
    _refuse_without_triton(name)
    device = torch.device(name if ":" in name else f"{name}:0")
    count = torch.cuda.device_count()
    if device.index >= count:
        raise ConfigError(
            f"device={name!r}: this process sees {count} CUDA device{'s' if count > 1 else ''}; "
            f"set cuda:0{f' to cuda:{count - 1}' if count > 1 else ''}, or change "
            "CUDA_VISIBLE_DEVICES"
        )
    return device


def _refuse_without_triton(name: str) -> None:
    try:
        import triton  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"device={name!r}: the kernels that compute there are written in Triton, which is not "
            f'installed; pip install "tidegate[gpu]", or set device to cpu'
        ) from error


@contextmanager
def on(device: torch.device) -> Iterator[None]:
    """Make ``device`` current: Triton launches on the current device, wherever the tensors are."""
    if device.type == CPU:  # with Triton's interpreter
        yield
        return
    with torch.cuda.device(device):
        yield


def synchronize(device: torch.device) -> None:
    """Synchronise with the current stream of ``device``."""
    if device.type != CPU:
        torch.cuda.current_stream(device).synchronize()
