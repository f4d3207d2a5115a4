"""What does a run leave behind in its directory? Everything, written while it goes on.

    run.json              settings, versions of packages, statistics at the end
    metrics.jsonl         a line per batch
    trajectories.parquet  a row per rollout, with the provenance of each token
    trace.json            the timeline, for ui.perfetto.dev
    weights/v00012/       each version; a whole set is loadable by transformers

Does not decide what is worth recording, nor when. Called from several threads; the files are
written by one thread of its own. A full queue makes callers wait: nothing is left out in silence.
"""

import importlib.metadata
import platform
import shutil
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from tidegate.errors import ConfigError, RunClosed
from tidegate.orchestrator.core.rollout import Rollout
from tidegate.orchestrator.records.episode_tracks import EpisodeInterval
from tidegate.orchestrator.records.run_files import RunFiles, appearing_whole, replace_file
from tidegate.orchestrator.records.trace import TRACE_FILE, Trace, TrainerActivity
from tidegate.orchestrator.records.trajectories import (
    RecordedRollout,
    RecordedTurn,
    Snapshot,
    read_trajectories,
    snapshot,
    to_json,
)
from tidegate.orchestrator.statistics import RunStatistics
from tidegate.orchestrator.weights.parts import WHOLE, WeightParts

if TYPE_CHECKING:
    import torch

__all__ = ["RecordedRollout", "RecordedTurn", "RunRecorder", "read_trajectories", "weights_path"]

RUN_FILE = "run.json"

QUEUED_WEIGHTS_MAX = 2
"""Copies of the whole model that may wait for the disk. The third ``weights`` waits."""

ROLLOUTS_PER_JOB = 32
"""Turned into columns at once, about 2 ms that the event loop can't have the interpreter."""

PACKAGES = ("tidegate", "torch", "transformers", "pyarrow", "pyzmq", "msgspec", "numpy")


def weights_path(directory: Path, version: int) -> Path:
    """Where a run's directory keeps the weights of ``version``."""
    return Path(directory) / "weights" / f"v{version:05d}"


def archives(directory: Path) -> list[Path]:
    """Where weights may be: a resumed run's records need those that its other parts archived."""
    run = directory.parent
    parts = [directory, run, *sorted(run.glob("part-*"))] if _is_part(directory) else [directory]
    return [part / "weights" for part in parts if (part / "weights").is_dir()]


def archived_weights(directory: Path, version: int) -> Path:
    """Where the weights of ``version`` are, among the run's parts."""
    name = weights_path(directory, version).name
    found = (archive / name for archive in archives(directory) if (archive / name).is_dir())
    return next(found, weights_path(directory, version))


def _is_part(directory: Path) -> bool:
    return directory.name.startswith("part-") and (directory.parent / RUN_FILE).exists()


class RunRecorder:
    """Writes one run's directory. Close it, or use it in ``with``: Parquet needs its footer.

    Raises:
        ConfigError: the directory already holds a run, or the model has no config.json.
    """

    def __init__(self, directory: Path, *, settings: Mapping[str, object], model: Path) -> None:
        self.directory = Path(directory)
        self._model = Path(model)
        if (self.directory / RUN_FILE).exists():
            raise ConfigError(
                f"{self.directory} already holds a recorded run; choose another name, or delete it"
            )
        if not (self._model / "config.json").is_file():
            raise ConfigError(f"{self._model} has no config.json, so its weights can't be archived")
        self.directory.mkdir(parents=True, exist_ok=True)
        self._run: dict[str, object] = {
            "settings": dict(settings),
            "model": str(self._model.resolve()),
            "packages": _package_versions(),
            "statistics": None,
            "extra": {},
        }
        self._lock = threading.Lock()
        """Held for microseconds: guards the trace and the rollouts not yet queued."""
        self._trace = Trace()
        self._pending: list[Snapshot] = []
        self._is_closed = False
        self._weights_slots = threading.BoundedSemaphore(QUEUED_WEIGHTS_MAX)
        self._files = RunFiles(self.directory)
        self._write_run_file()
        self._files.submit(self._archive_model)

    # ------------------------------------------------------------ called while the run goes on

    def rollout(
        self,
        rollout: Rollout,
        *,
        task: object,
        advantage: float | None,
        consumed_version: int | None,
    ) -> None:
        """Record a rollout that has ended, copied as it is now."""
        row = snapshot(
            rollout,
            task=task,
            advantage=advantage,
            consumed_version=consumed_version,
        )
        with self._lock:
            self._refuse_if_closed()
            self._pending.append(row)
            if len(self._pending) < ROLLOUTS_PER_JOB:
                return
            full, self._pending = self._pending, []
        self._files.submit(lambda: self._files.write_rollouts(full))

    def trained(
        self,
        rows: Sequence[tuple[Rollout, object]],
        *,
        advantages: Sequence[float],
        consumed_version: int,
    ) -> None:
        """Record a batch's, each told with its task."""
        for (rollout, task), advantage in zip(rows, advantages, strict=True):
            self.rollout(rollout, task=task, advantage=advantage, consumed_version=consumed_version)

    def engine_step(
        self,
        engine: str,
        started_us: int,
        busy_us: int,
        version: int,
        rows: int,
        prefills: int = 0,
    ) -> None:
        """Record that an engine made ``rows`` tokens with ``version``; costs a microsecond."""
        with self._lock:
            self._trace.engine_step(
                engine,
                started_us=started_us,
                busy_us=busy_us,
                version=version,
                rows=rows,
                prefills=prefills,
            )

    def engine_event(self, engine: str, name: str, at_us: int, **args: object) -> None:
        """Record an instant of an engine's life: staged, swap, paused, resumed, lost."""
        with self._lock:
            self._trace.instant(engine, name, at_us, args)

    def trainer_interval(
        self, kind: TrainerActivity, started_us: int, ended_us: int, version: int
    ) -> None:
        """Record what the trainer did; of ``publish``, ``version`` is the one published."""
        with self._lock:
            self._trace.trainer_interval(kind, started_us, ended_us, version)

    def episode_interval(self, interval: EpisodeInterval) -> None:
        """Record an episode, or something that went on in it."""
        with self._lock:
            self._trace.episodes.append(interval)

    def batch(self, metrics: Mapping[str, float]) -> None:
        """Record one line per batch. The report draws ``reward`` over ``version``."""
        line = to_json(dict(metrics)) + b"\n"
        self._refuse_if_closed()
        self._files.submit(lambda: self._files.write_metrics(line))

    def weights(
        self,
        version: int,
        state_dict: "Mapping[str, torch.Tensor]",
        parts: WeightParts = WHOLE,
    ) -> None:
        """Archive a version; the tensors are copied before this returns. ``parts`` says what else
        it is made of."""
        self._refuse_if_closed()
        tensors = _detached_copies(state_dict)
        self._weights_slots.acquire()

        def write() -> None:
            try:
                self._archive_tensors(version, tensors, parts)
            finally:
                self._weights_slots.release()

        self._files.submit(write)

    def finish(self, statistics: RunStatistics, **extra: object) -> None:
        """Record how it ended. The report knows ``reward_before``, ``reward_after``, ``warm_up``.

        May be called again: later calls add to ``extra`` and replace what they repeat.
        """
        self._refuse_if_closed()
        known = self._run["extra"]
        merged = {**known, **extra} if isinstance(known, dict) else extra
        self._run = {**self._run, "statistics": statistics, "extra": merged}
        self._write_run_file()

    # ------------------------------------------------------------ the end

    def close(self) -> None:
        """Write what is left and wait until all of it is on disk. Harmless when repeated.

        Raises:
            OSError: the disk refused something since the start; the rest was written if it could.
        """
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            rest, self._pending = self._pending, []
        self._files.submit(lambda: self._files.write_rollouts(rest))
        self._files.submit(lambda: self._trace.write(self.directory / TRACE_FILE))
        self._files.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _refuse_if_closed(self) -> None:
        if self._is_closed:
            raise RunClosed(f"the recorder of {self.directory} is closed")

    def _write_run_file(self) -> None:
        body = to_json(self._run)
        self._files.submit(lambda: replace_file(self.directory / RUN_FILE, body))

    def _archive_model(self) -> None:
        """Keep version 0: the model's own directory may be gone when the run is audited."""
        with appearing_whole(weights_path(self.directory, 0)) as target:
            for pattern in ("config.json", "*.safetensors", "*.safetensors.index.json"):
                for file in self._model.glob(pattern):
                    shutil.copy(file, target / file.name)

    def _archive_tensors(
        self, version: int, tensors: "dict[str, torch.Tensor]", parts: WeightParts
    ) -> None:
        from safetensors.torch import save_file  # it imports torch, which takes a second

        with appearing_whole(weights_path(self.directory, version)) as target:
            save_file(tensors, target / parts.file_name, metadata={"format": "pt"})
            shutil.copy(self._model / "config.json", target / "config.json")
            parts.write(target)


def _detached_copies(state_dict: "Mapping[str, torch.Tensor]") -> "dict[str, torch.Tensor]":
    """Copy to the host; of tensors that are one memory (tied embeddings), only the first."""
    copies: dict[str, torch.Tensor] = {}
    seen: set[tuple[int, tuple[int, ...], tuple[int, ...]]] = set()
    for name, tensor in state_dict.items():
        identity = (tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride()))
        if tensor.numel() and identity in seen:
            continue
        seen.add(identity)
        # A copy even where nothing needs moving: the trainer goes on changing the original.
        copies[name] = tensor.detach().to("cpu", copy=True).contiguous()
    return copies


def _package_versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return versions
