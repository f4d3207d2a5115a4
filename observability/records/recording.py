"""Recorder of one process of a run: everything it leaves in the run's directory.

    run.json              settings, package versions, statistics
    metrics.jsonl         one line per batch
    evaluations.jsonl     one line per evaluation, if there was one
    trajectories.arrows   Arrow IPC stream: one row per rollout, appended as rollouts end
    trajectories.parquet  the same rows, with the provenance of each token; written by close()
    trace.json            Chrome trace for ui.perfetto.dev; written by close()
    weights/              the versions: :mod:`weight_archive`

The run calls it through the :class:`Recorder` interface, from several threads. One background
thread writes the files (:mod:`run_files`). If its queue is full, callers block: nothing is dropped
silently. After a crash, everything already written is readable; :meth:`RunRecorder.sync` waits
until all that was recorded so far is written.
"""

import hashlib
import importlib.metadata
import platform
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Self

from tidegate.errors import ConfigError, RecordingFailed, RunClosed
from tidegate.observability.records.run_directories import RUN_FILE
from tidegate.observability.records.run_files import (
    EVALUATIONS_FILE,
    METRICS_FILE,
    RunFiles,
    replace_file,
)
from tidegate.observability.records.trace import TRACE_FILE, Trace
from tidegate.observability.records.trajectories import (
    STREAM_FILE,
    RecordedRollout,
    RecordedTurn,
    RolloutSnapshot,
    image_path,
    read_trajectories,
    snapshot_rollout,
)
from tidegate.observability.records.weight_archive import (
    WeightArchive,
    adapter_weights_path,
    weights_path,
)
from tidegate.orchestrator.batches.tasks import to_json
from tidegate.orchestrator.core.rollout import Rollout
from tidegate.orchestrator.journal.resuming import JOURNAL_FILE
from tidegate.orchestrator.telemetry.recorder import (
    EngineStep,
    EpisodeInterval,
    Recorder,
    TrainerActivity,
)
from tidegate.orchestrator.telemetry.statistics import RunStatistics
from tidegate.orchestrator.weight_sync.parts import WHOLE, WeightParts
from tidegate.transport.images import IMAGE_BYTES_MAX, decoded
from tidegate.transport.media import Media
from tidegate.transport.private_directory import make_private_directory
from tidegate.transport.regular_files import read_regular

if TYPE_CHECKING:
    import torch

__all__ = ["RecordedRollout", "RecordedTurn", "RunRecorder", "read_trajectories"]

QUEUED_WEIGHTS_MAX = 2
"""Copies of the whole model that may wait for the disk; a third call of ``weights`` blocks."""

STATISTICS_INTERVAL_S = 1.0
"""Shortest time between two writes of run.json. Encoding takes 10 ms for 1,000 engines."""

ROLLOUTS_PER_JOB = 32
"""Rollouts converted to Arrow columns at once, which holds the GIL for about 2 ms."""

PACKAGES = ("tidegate", "torch", "transformers", "pyarrow", "pyzmq", "msgspec", "numpy")
"""Packages whose versions are recorded in run.json."""


class RunRecorder(Recorder):
    """Writes the directory of one process of a run. Close it, or use it in ``with``.

    Args:
        directory: is created, with mode 0700.
        settings: recorded in run.json.
        model: the model's directory; its weights are archived as version 0.
        archive_weights: which versions are archived; the run's setting of this name.
        resumed_batches: batches in the checkpoint that the process resumes from; None for a new
            run.
        on_failure: called once, from the writing thread, if a file can't be written.

    Raises:
        ConfigError: the directory already holds a run, or the model has no config.json.
    """

    keeps_episodes = True

    def __init__(
        self,
        directory: Path,
        *,
        settings: Mapping[str, object],
        model: Path,
        archive_weights: str = "all",
        resumed_batches: int | None = None,
        on_failure: Callable[[RecordingFailed], None] = lambda failure: None,
    ) -> None:
        self.directory = Path(directory)
        self._model = Path(model)
        if (self.directory / RUN_FILE).exists():
            resume = "it keeps no journal, so it can't be resumed"
            if (self.directory / JOURNAL_FILE).exists():
                resume = (
                    f"resume it (serve(journal=True, resume=True), or `tidegate run --resume "
                    f"{self.directory}`)"
                )
            raise ConfigError(
                f"{self.directory} already holds a recorded run: {resume}, choose another name, or "
                f"delete it"
            )
        if not (self._model / "config.json").is_file():
            raise ConfigError(f"{self._model} has no config.json, so its weights can't be archived")
        make_private_directory(self.directory)
        self._run: dict[str, object] = {
            "settings": dict(settings),
            "model": str(self._model.resolve()),
            "packages": _package_versions(),
            "statistics": None,
            "is_final": False,
            "resumed_batches": resumed_batches,
            "dtypes": {},
            "extra": {},
        }
        self._lock = threading.Lock()
        """Guards the trace, the run record and the pending rollouts; held for microseconds."""
        self._trace = Trace()
        self._pending: list[RolloutSnapshot] = []
        self._images: set[str] = set()
        """Digests of the images that are written, or queued for it."""
        self._is_closed = False
        self._weights_slots = threading.BoundedSemaphore(QUEUED_WEIGHTS_MAX)
        self._statistics_due_s = 0.0
        self._files = RunFiles(self.directory, on_failure)
        self._write_run_file()
        self._weights = WeightArchive(self.directory, self._model, archive_weights)
        self._files.submit(self._weights.write_model, "weights/v00000")

    # ------------------------------------------------------------ called during the run

    def rollout(
        self,
        rollout: Rollout,
        *,
        task: object,
        advantage: float | None,
        consumed_version: int | None,
    ) -> None:
        """Record a rollout that has ended, copied in its present state."""
        row = snapshot_rollout(
            rollout,
            task=task,
            advantage=advantage,
            consumed_version=consumed_version,
        )
        for media in rollout.media if rollout.may_have_media else ():
            self._keep_image(media)
        with self._lock:
            self._refuse_if_closed()
            self._pending.append(row)
            if len(self._pending) < ROLLOUTS_PER_JOB:
                return
            full, self._pending = self._pending, []
        self._write_rollouts(full)

    def _keep_image(self, media: Media) -> None:
        """Write the file of an image that the run has read, once, for the audit."""
        place = media.position
        if isinstance(place, int) or place.digest in self._images:
            return
        self._images.add(place.digest)

        def write() -> None:
            path = image_path(self.directory, place.digest)
            is_inline = media.url.startswith("data:")
            source = Path(media.url.removeprefix("file://"))
            try:
                content = decoded(media) if is_inline else read_regular(source, IMAGE_BYTES_MAX)
            except OSError:
                return  # removed since the turn; the audit says so
            path.parent.mkdir(exist_ok=True)
            if hashlib.sha256(content).hexdigest() == place.digest:
                path.write_bytes(content)

        self._files.submit(write, f"images/{place.digest}")

    def trained(
        self,
        rows: Sequence[tuple[Rollout, object]],
        *,
        advantages: Sequence[float],
        consumed_version: int,
    ) -> None:
        """Record the rows of a batch, each with its task."""
        for (rollout, task), advantage in zip(rows, advantages, strict=True):
            self.rollout(rollout, task=task, advantage=advantage, consumed_version=consumed_version)

    def engine_step(self, step: EngineStep) -> None:
        """Add the step to the trace; costs about a microsecond."""
        with self._lock:
            self._trace.engine_step(step)

    def engine_event(self, engine: str, name: str, at_us: int, **args: object) -> None:
        """Record an instant of an engine: staged, swap, paused, resumed, lost."""
        with self._lock:
            self._trace.instant(engine, name, at_us, args)

    def engine_dtype(self, engine: str, dtype: str) -> None:
        """Record an engine's compute dtype; the audit's tolerance depends on it."""
        with self._lock:
            if self._is_closed:
                return
            known = self._run["dtypes"]
            merged = {**known, engine: dtype} if isinstance(known, dict) else {engine: dtype}
            self._run = {**self._run, "dtypes": merged}
        self._write_run_file()

    def trainer_interval(
        self, kind: TrainerActivity, started_us: int, ended_us: int, version: int
    ) -> None:
        """Record an activity of the trainer; for ``publish``, ``version`` is the published one."""
        with self._lock:
            self._trace.trainer_interval(kind, started_us, ended_us, version)

    def episode_interval(self, interval: EpisodeInterval) -> None:
        """Record an episode, or an activity within one."""
        with self._lock:
            self._trace.episodes.append(interval)

    def batch(self, metrics: Mapping[str, float]) -> None:
        """Record one line of metrics.jsonl. The report draws ``reward`` over ``version``."""
        line = to_json(dict(metrics)) + b"\n"
        with self._lock:
            self._refuse_if_closed()
            pending, self._pending = self._pending, []
        self._write_rollouts(pending)  # a batch's rows are written before its line
        self._files.submit(lambda: self._files.write_metrics(line), METRICS_FILE)

    def evaluation(self, figures: Mapping[str, object]) -> None:
        """Record one line of evaluations.jsonl."""
        line = to_json(dict(figures)) + b"\n"
        self._refuse_if_closed()
        self._files.submit(lambda: self._files.write_evaluation(line), EVALUATIONS_FILE)

    def weights(
        self,
        version: int,
        state_dict: "Mapping[str, torch.Tensor]",
        parts: WeightParts = WHOLE,
    ) -> None:
        """Archive a version, copied before this returns; ``parts``: what else it consists of."""
        self._archive(version, weights_path(self.directory, version), state_dict, parts)

    def adapter_weights(
        self,
        name: str,
        version: int,
        tensors: "Mapping[str, torch.Tensor]",
        parts: WeightParts,
    ) -> None:
        """Archive a version of an adapter that counts its own, copied before this returns.

        One thread writes all files in order, so rows of its tokens are written after it.
        """
        target = adapter_weights_path(self.directory, name, version)
        self._archive(version, target, tensors, parts)

    def _archive(
        self,
        version: int,
        target: Path,
        state_dict: "Mapping[str, torch.Tensor]",
        parts: WeightParts,
    ) -> None:
        self._refuse_if_closed()
        if not self._weights.takes(version, parts):
            return
        tensors = _detached_copies(state_dict, keeps_shared=parts.is_adapter)
        self._weights_slots.acquire()

        def write() -> None:
            try:
                self._weights.write(target, tensors, parts)
            finally:
                self._weights_slots.release()

        self._files.submit(write, str(target.relative_to(self.directory)))

    @property
    def wants_statistics(self) -> bool:
        """Whether the statistics on disk are older than :data:`STATISTICS_INTERVAL_S`."""
        return time.monotonic() >= self._statistics_due_s

    def statistics(self, statistics: RunStatistics) -> None:
        """Record a snapshot of the run, for readers after a crash."""
        with self._lock:
            if self._is_closed or self._run["is_final"]:
                return
            self._statistics_due_s = time.monotonic() + STATISTICS_INTERVAL_S
            self._run = {**self._run, "statistics": statistics}
        self._write_run_file()

    def sync(self) -> None:
        """Wait until everything recorded so far would survive a crash of the process.

        Except for archived weights, it would also survive a power failure.

        Raises:
            RecordingFailed: a file could not be written since the start, or the disk does not
                respond.
        """
        with self._lock:
            self._refuse_if_closed()
            pending, self._pending = self._pending, []
        self._write_rollouts(pending)
        self._files.sync()

    @property
    def failure(self) -> RecordingFailed | None:
        """The first write that failed; None if none did."""
        return self._files.failure

    def finish(self, statistics: RunStatistics, **facts: object) -> None:
        """Record the final statistics, and facts of the owner.

        The report shows ``reward_before``, ``reward_after`` and ``warm_up``. May be called again:
        later facts are added to earlier ones, or replace them.
        """
        with self._lock:
            self._refuse_if_closed()
            known = self._run["extra"]
            merged = {**known, **facts} if isinstance(known, dict) else facts
            self._run = {**self._run, "statistics": statistics, "extra": merged}
        self._write_run_file()

    # ------------------------------------------------------------ the end

    def close(self) -> None:
        """Write everything left and wait until it is written. May be called again.

        Raises:
            RecordingFailed: a file could not be written since the start; the others were written.
        """
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            pending, self._pending = self._pending, []
            self._run = {**self._run, "is_final": True}
        self._write_rollouts(pending)
        self._files.submit(lambda: self._trace.write(self.directory / TRACE_FILE), TRACE_FILE)
        self._write_run_file()
        self._files.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _refuse_if_closed(self) -> None:
        if self._is_closed:
            raise RunClosed(
                f"the recorder of {self.directory} is closed, because its run has ended"
            )

    def _write_rollouts(self, rows: list[RolloutSnapshot]) -> None:
        if rows:
            self._files.submit(lambda: self._files.write_rollouts(rows), STREAM_FILE)

    def _write_run_file(self) -> None:
        body = to_json(self._run)
        self._files.submit(lambda: replace_file(self.directory / RUN_FILE, body), RUN_FILE)


def _detached_copies(
    state_dict: "Mapping[str, torch.Tensor]", *, keeps_shared: bool
) -> "dict[str, torch.Tensor]":
    """Copy tensors to the host; of tensors that share memory (tied embeddings), only the first
    unless ``keeps_shared``."""
    copies: dict[str, torch.Tensor] = {}
    seen: set[tuple[int, tuple[int, ...], tuple[int, ...]]] = set()
    for name, tensor in state_dict.items():
        identity = (tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride()))
        if tensor.numel() and identity in seen and not keeps_shared:
            continue
        seen.add(identity)
        # Copy CPU tensors too: the trainer keeps changing the originals.
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
