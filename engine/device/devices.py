"""On which device does an engine compute? A name in, a device that is there out, or why not.

It knows no models. ``cpu`` is no device in this sense: it has a runner of its own.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tidegate.errors import ConfigError

CPU = "cpu"
"""The name of what every machine has."""

NAMES = re.compile(r"cuda(:\d+)?")


def find_device(name: str) -> torch.device | None:
    """The device called ``cuda`` or ``cuda:N``; None for ``cpu``.

    Raises:
        ConfigError: there is none, or Triton is missing.
    """
    if name == CPU:
        return None
    if NAMES.fullmatch(name) is None:
        raise ConfigError(f"device must be cpu, cuda or cuda:N, got {name!r}")
    if not torch.cuda.is_available():
        raise ConfigError(
            f"device={name!r}: torch {torch.__version__} finds no CUDA device here; install a CUDA "
            f"build of torch and its driver, or set device to cpu"
        )
    _refuse_without_triton(name)
    device = torch.device(name if ":" in name else f"{name}:0")
    count = torch.cuda.device_count()
    if device.index >= count:
        raise ConfigError(f"device={name!r}: this process sees {count} devices, numbered from 0")
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
    """Launch on ``device`` in here: Triton asks which one is current, not where tensors are."""
    if device.type == CPU:  # with Triton's interpreter
        yield
        return
    with torch.cuda.device(device):
        yield


def wait_for(device: torch.device) -> None:
    """Return once all that was launched on the current stream is done."""
    if device.type != CPU:
        torch.cuda.current_stream(device).synchronize()
