"""How is a dataset of reasoning-gym an environment? One question, one answer, the library's grade.

    pool.environment(
        "tidegate.integrations.environments.reasoning_gym_tasks:ReasoningGym",
        dataset="chain_sum", settings={"min_terms": 2, "max_terms": 3},
    )

A task is the index of an entry, which the library makes from its own seed and that; any other task
gets one by the group's seed.
"""

import json
from functools import cache
from typing import Any

from tidegate.environments.environment import Observation
from tidegate.integrations.environments.packages import package

ENTRIES = 10**8
"""Entries are made when they are asked for, so that many cost nothing."""


class ReasoningGym:
    """One entry of a dataset."""

    def __init__(
        self,
        dataset: str,
        *,
        settings: dict[str, Any] | None = None,
        prompt: str = "{question}\n",
        answer_tag: str | None = None,
    ) -> None:
        """``settings`` are the dataset's own; ``seed`` and ``size`` among them. ``prompt`` has
        ``{question}`` in it. With ``answer_tag="answer"``, the answer is what stands in
        ``<answer>…</answer>``, or nothing; else it is all that the model says."""
        self._dataset = _dataset(dataset, json.dumps(settings or {}, sort_keys=True))
        self._prompt = prompt
        self._tag = answer_tag

    def reset(self, *, seed: int, task: Any) -> Observation:
        """Ask."""
        is_index = isinstance(task, int) and not isinstance(task, bool)
        self._entry = self._dataset[(task if is_index else seed) % len(self._dataset)]
        return Observation(self._prompt.replace("{question}", self._entry["question"]))

    def step(self, action: str) -> Observation:
        """Grade."""
        answer: str | None = action
        if self._tag is not None:
            utils = package("reasoning_gym.utils", distribution="reasoning-gym")
            answer = utils.extract_answer(action, tag_name=self._tag)
        score = self._dataset.score_answer(answer=answer, entry=self._entry)
        return Observation("", reward=score, done=True)

    def close(self) -> None:
        """Nothing is held."""


@cache
def _dataset(name: str, settings: str) -> Any:
    """One per process: some take long to make."""
    reasoning_gym = package("reasoning_gym", distribution="reasoning-gym")
    return reasoning_gym.create_dataset(name, **{"size": ENTRIES, **json.loads(settings)})
