"""Experiment trackers as ``on_batch`` callbacks: TensorBoard, W&B and MLflow.

Users pass one to a run, ``serve(on_batch=TensorBoard("runs/tb"))``, or name it in the ``[logging]``
section of a file for ``tidegate run``. The run calls it with each batch's figures. Each tracker
imports its own package when it is made.
"""

import importlib
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from tidegate.errors import ConfigError

STEP = "version"
"""Figure used as the trackers' step: the weight version, so that the loss can share it."""

PREFIX = "tidegate/"
"""Prefix of the names of all figures, which distinguishes them from the trainer's own."""

log = logging.getLogger("tidegate")


class Tracker(ABC):
    """Base of the trackers: writes the figures of each batch. Close it, or use it in ``with``."""

    def __call__(self, figures: Mapping[str, float]) -> None:
        """Write the figures of one batch."""
        values = {f"{PREFIX}{name}": value for name, value in figures.items() if name != STEP}
        self._write(values, int(figures[STEP]))

    @abstractmethod
    def _write(self, values: Mapping[str, float], step: int) -> None:
        """Write values under their full names."""

    @abstractmethod
    def close(self) -> None:
        """Write everything that is queued, and end the tracker's run. May be called again."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class TensorBoard(Tracker):
    """Writes each batch's figures as scalars ``tidegate/<name>``. Close it, or use it in ``with``.

    ``writer`` is torch's ``SummaryWriter``; use it to add scalars of your own.

    Raises:
        ConfigError: tensorboard is not installed.
    """

    def __init__(self, directory: Path | str) -> None:
        board = _import("torch.utils.tensorboard", 'pip install "tidegate[tensorboard]"')
        self.writer: Any = board.SummaryWriter(str(directory))

    def _write(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush and close the writer. May be called again."""
        self.writer.close()


class WandB(Tracker):
    """Logs each batch's figures to a Weights & Biases run as ``tidegate/<name>``.

    ``options`` are those of ``wandb.init``, such as ``project``, ``name``, ``dir`` and ``mode``.
    ``run`` is the run that it returned; use it to log values of your own.

    Raises:
        ConfigError: wandb is not installed.
    """

    def __init__(self, **options: Any) -> None:
        self.run: Any = _import("wandb", "pip install wandb").init(**options)

    def _write(self, values: Mapping[str, float], step: int) -> None:
        self.run.log(dict(values), step=step)

    def close(self) -> None:
        """Finish the W&B run. May be called again."""
        self.run.finish()


class MLflow(Tracker):
    """Logs each batch's figures to a new MLflow run as ``tidegate/<name>``.

    Uses a client of its own, and leaves MLflow's global settings and active run alone.

    Args:
        experiment: name of the experiment, created if it does not exist.
        tracking_uri: of the server or database; default: ``MLFLOW_TRACKING_URI``.
        run_name: default: MLflow chooses one.

    Raises:
        ConfigError: mlflow is not installed.
    """

    def __init__(
        self,
        experiment: str = "tidegate",
        *,
        tracking_uri: str | None = None,
        run_name: str | None = None,
    ) -> None:
        mlflow = _import("mlflow", "pip install mlflow-skinny, or mlflow")
        self._metric = mlflow.entities.Metric
        self.client: Any = mlflow.MlflowClient(tracking_uri=tracking_uri)
        found = self.client.get_experiment_by_name(experiment)
        experiment_id = (
            self.client.create_experiment(experiment) if found is None else found.experiment_id
        )
        self.run_id: str = self.client.create_run(experiment_id, run_name=run_name).info.run_id
        """Id of the MLflow run, for values of your own."""
        self._is_closed = False

    def _write(self, values: Mapping[str, float], step: int) -> None:
        now_ms = int(1000 * time.time())
        metrics = [self._metric(name, float(v), now_ms, step) for name, v in values.items()]
        self.client.log_batch(self.run_id, metrics=metrics)

    def close(self) -> None:
        """End the MLflow run. May be called again."""
        if not self._is_closed:
            self._is_closed = True
            self.client.set_terminated(self.run_id)


def log_batch(figures: Mapping[str, float]) -> None:
    """Log a batch's figures to the logger ``tidegate``; with ``log_as_json`` each is a field."""
    log.info("batch=trained " + " ".join(f"{name}=%s" for name in figures), *figures.values())


def call_all(
    callbacks: Sequence[Callable[[Mapping[str, float]], object]],
) -> Callable[[Mapping[str, float]], None]:
    """Return a callback that calls all of ``callbacks``, also if one of them raises."""

    def call(figures: Mapping[str, float]) -> None:
        errors = []
        for callback in callbacks:
            try:
                callback(figures)
            except Exception as error:  # noqa: BLE001 - raised below
                errors.append(error)
        if errors:
            raise ExceptionGroup("callbacks of a batch failed", errors)

    return call


def _import(module: str, install: str) -> Any:
    package = module.partition(".")[0]
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        package = (error.name or module).partition(".")[0]
    else:
        if found.__file__ is not None:  # a folder of the name, such as W&B's ./wandb, has none
            return found
    raise ConfigError(f"{package} is missing: {install}")
