"""How do a run's figures come into TensorBoard? By the writer that torch has, a point per batch.

It is told what any callback is told: ``serve(on_batch=TensorBoard("runs/tb"))``.
"""

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tidegate.errors import ConfigError

STEP = "version"
"""The weight version: what else is drawn over it, such as a loss, has the same."""


class TensorBoard:
    """Writes each batch's figures under ``tidegate/``; close it, or use it in ``with``.

    ``writer`` is torch's, for whatever else is to be drawn beside them.

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
        """One batch."""
        step = int(figures[STEP])
        for name, value in figures.items():
            if name != STEP:
                self.writer.add_scalar(f"tidegate/{name}", value, step)

    def close(self) -> None:
        """Write what is left. Harmless if repeated."""
        self.writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
