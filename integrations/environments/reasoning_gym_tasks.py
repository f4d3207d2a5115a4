"""Adapter for reasoning-gym datasets: one question, one answer, scored by the library.

A pool's worker processes create it by name and call it as an :class:`Environment`.

    pool.environment(
        "tidegate.integrations.environments.reasoning_gym_tasks:ReasoningGym",
        dataset="chain_sum", settings={"min_terms": 2, "max_terms": 3},
    )

A task is the index of an entry, which the library generates from its own seed and the index. For
any other task, the group's seed selects the entry.
"""

import json
from functools import cache
from typing import Any

from tidegate.environments.environment import Observation
from tidegate.integrations.environments.packages import package

ENTRIES = 10**8
"""Dataset size; entries are generated on demand, so a large number costs nothing."""


class ReasoningGym:
    """One entry of a dataset, as an environment of one step."""

    def __init__(
        self,
        dataset: str,
        *,
        settings: dict[str, Any] | None = None,
        prompt: str = "{question}\n",
        answer_tag: str | None = None,
    ) -> None:
        """Load the dataset.

        Args:
            dataset: name of the dataset.
            settings: the dataset's own settings, ``seed`` and ``size`` included.
            prompt: template with ``{question}``.
            answer_tag: with ``"answer"``, the answer is the text in ``<answer>…</answer>``; by
                default it is the whole turn.
        """
        self._dataset = _dataset(dataset, json.dumps(settings or {}, sort_keys=True))
        self._prompt = prompt
        self._tag = answer_tag

    def reset(self, *, seed: int, task: Any) -> Observation:
        """Return the entry's question."""
        is_index = isinstance(task, int) and not isinstance(task, bool)
        self._entry = self._dataset[(task if is_index else seed) % len(self._dataset)]
        return Observation(self._prompt.replace("{question}", self._entry["question"]))

    def step(self, action: str) -> Observation:
        """Score the answer, and end the episode."""
        answer: str | None = action
        if self._tag is not None:
            utils = package("reasoning_gym.utils", distribution="reasoning-gym")
            answer = utils.extract_answer(action, tag_name=self._tag)
        score = self._dataset.score_answer(answer=answer, entry=self._entry)
        return Observation("", reward=score, done=True)

    def close(self) -> None:
        """Do nothing."""


@cache
def _dataset(name: str, settings: str) -> Any:
    """Return the dataset, cached per process because creating it may take long."""
    reasoning_gym = package("reasoning_gym", distribution="reasoning-gym")
    return reasoning_gym.create_dataset(name, **{"size": ENTRIES, **json.loads(settings)})
