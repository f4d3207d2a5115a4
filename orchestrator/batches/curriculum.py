"""A list of tasks with sampling weights that can change during a run.

Users pass a :class:`Curriculum` to ``rollouts.batches()`` in place of an iterator. The scheduler's
task feed draws from it on the run's loop. Draws, weights and statistics are kept in the core's
:class:`~tidegate.orchestrator.core.task_records.TaskRecords`, so a journal restores them.
"""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from tidegate.errors import ConfigError, ResumeMismatch
from tidegate.orchestrator.core.task_records import (
    NO_OUTCOME,
    CurriculumRecord,
    TaskStatistics,
)
from tidegate.policies.task_sampling import HardTaskReplay, TaskSampler, checked_weight

Weights = Mapping[int, float] | Sequence[float]
"""Weights by task index: a mapping of some, or a sequence of all."""

WeightFunction = Callable[[Any, TaskStatistics], float]
"""Returns a task's weight from the task and its statistics so far."""


class Curriculum:
    """Tasks of a run, drawn at random by weights that may change at any time.

        curriculum = tidegate.Curriculum(problems, weight=lambda task, seen: …)
        async for batch in rollouts.batches(curriculum, episode=solve):
            ...

    A task's weight is the one set by :meth:`set_weights` (1 at first), times ``weight(task,
    statistics)``. The function is called when the run begins to take tasks, and for a task whose
    statistics have changed. A task whose group is running is drawn only if no other task has a
    positive weight. The tasks end once all weights are 0, or after ``draws`` draws.

    With a journal, a resumed run has the same draws, weights and statistics; give the same tasks,
    settings and ``name``. A curriculum belongs to one run at a time.
    """

    def __init__(
        self,
        tasks: Sequence[Any],
        *,
        weight: WeightFunction | None = None,
        replay: HardTaskReplay | None = None,
        draws: int | None = None,
        seed: int = 0,
        name: str = "tasks",
    ) -> None:
        """Make a curriculum.

        Args:
            weight: part of the weights that depends on outcomes; runs on the run's loop, so it must
                be quick. None: 1 for each task.
            replay: replays hard tasks; None: no replays.
            draws: number of draws after which the tasks end; None: never.
            seed: seed of the draws.
            name: identifies the curriculum's statistics in the run and in its journal.

        Raises:
            ConfigError: there are no tasks, or a value is out of range.
        """
        if not len(tasks):
            raise ConfigError("a Curriculum needs at least one task, got none")
        if draws is not None and draws < 1:
            raise ConfigError(f"draws must be >= 1, or None for no end, got {draws}")
        if not name:
            raise ConfigError("a Curriculum's name identifies its statistics: it can't be empty")
        self.tasks = tasks
        self.name = name
        self._weight = weight
        self._replay = replay
        self.num_draws_max = draws
        """Number of draws after which the tasks end; None: never."""
        self._seed = seed
        self._lock = threading.Lock()
        """Held while :attr:`_submit` and :attr:`_initial` are read or changed."""
        self._initial: dict[int, float] = {}
        """Weights set before a run took tasks."""
        self._submit: Callable[[tuple[tuple[int, float], ...]], None] | None = None
        self._record = CurriculumRecord()
        self._sampler: TaskSampler | None = None

    def __len__(self) -> int:
        return len(self.tasks)

    def __iter__(self) -> Any:
        raise ConfigError(
            "a run draws from a Curriculum, and reports outcomes to it: pass it to batches() "
            "or RolloutDataset as the tasks, without iterating over it"
        )

    @property
    def statistics(self) -> dict[int, TaskStatistics]:
        """Statistics by task index, for the tasks drawn so far; a snapshot, from any thread."""
        return dict(self._record.statistics)

    @property
    def num_draws(self) -> int:
        """Number of draws so far, replays included."""
        return self._record.num_draws

    def set_weights(self, weights: Weights) -> None:
        """Set the weights of some tasks, or of all, for the draws from now on. Any thread may call
        it.

        A task keeps its weight until it is set again. The weights are in the journal before the
        run's next call returns. Weights set before the run takes tasks are its initial weights; a
        resumed run uses the weights of its journal instead.

        Raises:
            ConfigError: an index or a weight is out of range, or a sequence has another length.
        """
        changed = tuple(self._checked(weights))
        with self._lock:
            if self._submit is None:
                self._initial.update(changed)
            else:
                self._submit(changed)

    def _checked(self, weights: Weights) -> Iterable[tuple[int, float]]:
        size = len(self.tasks)
        if not isinstance(weights, Mapping):
            if len(weights) != size:
                raise ConfigError(
                    f"set_weights() got {len(weights)} weights for {size} tasks; pass one for each "
                    f"task, or a mapping from task index to weight"
                )
            weights = dict(enumerate(weights))
        for item, weight in weights.items():
            if not 0 <= item < size:
                raise ConfigError(f"no task {item} among {size}: indices count from 0")
            yield item, float(checked_weight(item, weight))

    # ------------------------------------------------------------ on the run's loop

    def attach(
        self, record: CurriculumRecord, submit: Callable[[tuple[tuple[int, float], ...]], None]
    ) -> tuple[tuple[int, float], ...]:
        """Draw from ``record`` from now on; return the initial weights that it does not have yet.

        ``submit`` sets weights in the record; any thread may call it.

        Raises:
            ResumeMismatch: the record has a task that this curriculum lacks.
        """
        last = max(record.statistics.keys() | record.weights.keys(), default=-1)
        if last >= len(self.tasks):
            raise ResumeMismatch(
                f"the curriculum {self.name!r} has {len(self.tasks)} tasks, but task {last} was in "
                f"use before; give the same tasks in the same order, or another name"
            )
        self._record = record
        self._sampler = None
        with self._lock:
            self._submit = submit
            initial, self._initial = tuple(self._initial.items()), {}
        return () if record.weights else initial

    def draw(self) -> tuple[Any, int, bool] | None:
        """Return the next draw's task, its index and whether it is a replay; None at the end.

        Repeated calls return the same draw until the record has it.
        """
        if self.num_draws_max is not None and self.num_draws >= self.num_draws_max:
            return None
        drawn = self._updated_sampler().draw(self._record.num_draws)
        return None if drawn is None else (self.tasks[drawn[0]], *drawn)

    def _updated_sampler(self) -> TaskSampler:
        record, sampler = self._record, self._sampler
        if sampler is None:
            sampler = TaskSampler(len(self.tasks), seed=self._seed, replay=self._replay)
            items: Iterable[int] = range(len(self.tasks))
        else:
            items = record.changed
        for item in items:
            seen = record.statistics.get(item, NO_OUTCOME)
            weight = record.weights.get(item, 1.0)
            if self._weight is not None:
                weight *= self._weight(self.tasks[item], seen)
            sampler.update(
                item,
                weight,
                is_running=item in record.running,
                recent_reward=seen.recent_reward,
                replays=seen.replays,
            )
        record.changed.clear()
        self._sampler = sampler
        return sampler
