"""Adapter for skyrl-gym environments, which already exchange text.

A pool's worker processes create it by name and call it as an :class:`Environment`.

    pool.environment(
        "tidegate.integrations.environments.skyrl_gym_text:SkyRLGym", env="gsm8k"
    )

A task is a row of SkyRL's datasets: ``prompt``, a list of messages, and the fields that the
environment reads (``reward_spec``, ``extra_info``, …).
"""

from typing import Any

from tidegate.environments.environment import Observation, chat
from tidegate.integrations.environments.packages import package


class SkyRLGym:
    """One skyrl-gym environment."""

    def __init__(
        self, env: str, *, config: dict[str, Any] | None = None, imports: str | None = None
    ) -> None:
        """``env``: registered id; ``config``: its ``env_config``; ``imports``: module that
        registers it."""
        self._gym = package("skyrl_gym", distribution="skyrl-gym")
        if imports is not None:
            package(imports, distribution=imports.partition(".")[0])
        self._name = env
        self._config = config or {}
        self._env: Any = None

    def reset(self, *, seed: int, task: Any) -> Observation:
        """Create and initialise it. It depends on the task only, and takes no seed."""
        config = package("omegaconf", distribution="omegaconf").DictConfig(self._config)
        self._env = self._gym.make(self._name, env_config=config, extras=task)
        prompt, _ = self._env.init(task["prompt"])
        return chat(prompt)

    def step(self, action: str) -> Observation:
        """Pass the action on."""
        output = self._env.step(action)
        return chat(output["observations"], reward=output["reward"], done=output["done"])

    def close(self) -> None:
        """Close it."""
        if self._env is not None:
            self._env.close()
