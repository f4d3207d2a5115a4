"""Adapter for Gymnasium environments: writes observations as text, parses actions from text.

A pool's worker processes create it by name and call it as an :class:`Environment`.

    pool.environment(
        "tidegate.integrations.environments.gymnasium_text:GymnasiumText",
        env="FrozenLake-v1", settings={"is_slippery": False},
        actions=["left", "down", "right", "up"], describe="my_games:map_of",
    )

By default, observations are written as numbers, and actions are read as numbers or by name.
``describe`` and ``parse`` name functions that replace this: from an observation and the environment
to text, and from text to an action (ValueError if it is none).
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

from tidegate.environments.dotted_names import imported
from tidegate.environments.environment import Observation
from tidegate.integrations.environments.packages import package

NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")


class GymnasiumText:
    """One Gymnasium environment."""

    def __init__(
        self,
        env: str,
        *,
        settings: dict[str, Any] | None = None,
        prompt: str = "",
        actions: list[str] | None = None,
        describe: str | None = None,
        parse: str | None = None,
        imports: str | None = None,
    ) -> None:
        """Create the environment.

        Args:
            env: Gymnasium's id of the environment.
            settings: keyword arguments of ``gymnasium.make``.
            prompt: text before the first observation.
            actions: names of the actions of a Discrete space.
            describe: ``module:function`` that writes an observation.
            parse: ``module:function`` that reads an action.
            imports: a module that registers ``env``.
        """
        gymnasium = package("gymnasium", distribution="gymnasium")
        if imports is not None:
            package(imports, distribution=imports.partition(".")[0])
        self._env = gymnasium.make(env, **(settings or {}))
        self._prompt = prompt
        self._describe = None if describe is None else imported(describe)
        self._parse: Callable[[str], Any]
        if parse is not None:
            self._parse, self._help = imported(parse), ""
        else:
            reader = ActionReader(self._env.action_space, actions)
            self._parse, self._help = reader.read, f"; answer with {reader.help}"

    def reset(self, *, seed: int, task: Any) -> Observation:
        """Reset with the seed, and with the task's ``options`` if it has some."""
        options = task.get("options") if isinstance(task, Mapping) else None
        observation, _ = self._env.reset(seed=seed, options=options)
        return Observation(self._prompt + self._text(observation))

    def step(self, action: str) -> Observation:
        """Parse the text and act. If it is no action, only return an error text."""
        try:
            chosen = self._parse(action)
        except ValueError as error:
            return Observation(f"not an action: {error}{self._help}\n")
        observation, reward, terminated, truncated, _ = self._env.step(chosen)
        return Observation(self._text(observation), reward, done=terminated, truncated=truncated)

    def close(self) -> None:
        """Close it."""
        self._env.close()

    def _text(self, observation: Any) -> str:
        if self._describe is not None:
            return str(self._describe(observation, self._env))
        return f"{format_observation(observation)}\n"


def format_observation(observation: Any) -> str:
    """Format an observation of any space: floats with three digits, parts by name."""
    if isinstance(observation, str):
        return observation
    if isinstance(observation, Mapping):
        return "; ".join(
            f"{name}: {format_observation(part)}" for name, part in observation.items()
        )
    if hasattr(observation, "tolist"):
        return format_observation(observation.tolist())
    if isinstance(observation, list | tuple):
        return " ".join(
            f"({format_observation(part)})"
            if isinstance(part, list | tuple)
            else format_observation(part)
            for part in observation
        )
    return f"{observation:.3g}" if isinstance(observation, float) else str(observation)


class ActionReader:
    """Parser of actions of a Gymnasium space."""

    def __init__(self, space: Any, names: list[str] | None) -> None:
        """Check the space and the names.

        Raises:
            TypeError: the space needs a ``parse`` function, or ``names`` do not fit it.
        """
        self._kind = type(space).__name__
        self._space = space
        self._names = [name.casefold() for name in names or ()]
        if self._kind not in ("Discrete", "MultiDiscrete", "MultiBinary", "Box", "Text"):
            raise TypeError(f"actions of {space} can't be read by themselves; give `parse`")
        if self._names and (self._kind != "Discrete" or len(self._names) != space.n):
            raise TypeError(f"{len(self._names)} action names do not fit the space {space}")

    @property
    def help(self) -> str:
        """Description of a valid action, for the model."""
        if self._names:
            return "one of " + ", ".join(self._names)
        if self._kind == "Discrete":
            first = int(self._space.start)
            return f"a number from {first} to {first + int(self._space.n) - 1}"
        if self._kind == "Text":
            return f"{self._space.min_length} to {self._space.max_length} characters"
        return f"{self._count} numbers"

    def read(self, text: str) -> Any:
        """Return the action in the text.

        Raises:
            ValueError: there is none.
        """
        if self._kind == "Text":
            return self._if_in_space(text.strip(), text)
        if self._kind == "Discrete":
            name = text.strip().casefold()
            if name in self._names:
                return int(self._space.start) + self._names.index(name)
            return self._if_in_space(int(name) if name.lstrip("-").isdecimal() else None, text)
        numbers = [float(number) for number in NUMBER.findall(text)]
        if len(numbers) != self._count:
            raise ValueError(f"{len(numbers)} numbers in {text!r:.80}")
        numpy = package("numpy", distribution="numpy")
        array = numpy.array(numbers).reshape(self._space.shape).astype(self._space.dtype)
        return self._if_in_space(array, text)

    @property
    def _count(self) -> int:
        count = 1
        for extent in self._space.shape:
            count *= extent
        return count

    def _if_in_space(self, action: Any, text: str) -> Any:
        if action is None or not self._space.contains(action):
            raise ValueError(f"{text!r:.80}")
        return action
