"""TensorBoard export: an ``on_batch`` callback that writes figures with torch's ``SummaryWriter``.

Users pass it to a run, ``serve(on_batch=TensorBoard("runs/tb"))``; the run calls it per batch.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from tidegate.errors import ConfigError

STEP = "version"
"""Figure used as TensorBoard's global step: the weight version, so that the loss can share it."""


class TensorBoard:
    """Writes each batch's figures as scalars ``tidegate/<name>``. Close it, or use it in ``with``.

    ``writer`` is torch's ``SummaryWriter``; use it to add scalars of your own.

    Raises:
        ConfigError: tensorboard is not installed.
    """

    def __init__(self, directory: Path | str) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ConfigError(
                'tensorboard is missing: pip install "tidegate[tensorboard]"'
            ) from None
        self.writer: Any = SummaryWriter(str(directory))

    def __call__(self, figures: Mapping[str, float]) -> None:
        """Write the figures of one batch."""
        step = int(figures[STEP])
        for name, value in figures.items():
            if name != STEP:
                self.writer.add_scalar(f"tidegate/{name}", value, step)

    def close(self) -> None:
        """Flush and close the writer. May be called again."""
        self.writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
