"""Adapter for environments behind an OpenEnv server (WebSocket); one action field holds the text.

A pool's worker processes create it by name and call it as an :class:`Environment`.

    pool.environment(
        "tidegate.integrations.environments.openenv_client:OpenEnv",
        url="http://127.0.0.1:8000", action_field="message", text_field="echoed_message",
    )

A task that is a mapping is passed to the server's reset beside the seed. Each environment has its
own connection and session; the server must allow as many sessions as environments are open.
"""

import json
from collections.abc import Mapping
from typing import Any

from tidegate.environments.environment import Observation
from tidegate.integrations.environments.packages import package


class OpenEnv:
    """One session of an OpenEnv server."""

    def __init__(
        self,
        url: str,
        *,
        action_field: str,
        text_field: str | None = None,
        prompt: str = "",
        constants: dict[str, Any] | None = None,
    ) -> None:
        """Create the client; :meth:`reset` connects it.

        Args:
            url: the server's URL.
            action_field: field of the action that receives the model's text.
            text_field: field of the observation shown to the model; the whole observation as JSON
                if None.
            prompt: text before the first observation.
            constants: other fields of every action.
        """
        core = package("openenv.core", distribution="openenv-core")
        self._client = core.GenericEnvClient(base_url=url)
        self._action_field = action_field
        self._text_field = text_field
        self._prompt = prompt
        self._constants = constants or {}

    async def reset(self, *, seed: int, task: Any) -> Observation:
        """Connect, and reset the session."""
        await self._client.connect()
        options = dict(task) if isinstance(task, Mapping) else {}
        result = await self._client.reset(**{"seed": seed, **options})
        return self._observation(result, self._prompt)

    async def step(self, action: str) -> Observation:
        """Send the action."""
        result = await self._client.step({**self._constants, self._action_field: action})
        return self._observation(result, "")

    async def close(self) -> None:
        """Close the session."""
        await self._client.close()

    def _observation(self, result: Any, before: str) -> Observation:
        shown = result.observation
        if self._text_field is not None:
            if self._text_field not in shown:
                raise KeyError(
                    f"the server's observation has no {self._text_field!r}; it has {sorted(shown)}"
                )
            shown = shown[self._text_field]
        text = shown if isinstance(shown, str) else json.dumps(shown)
        return Observation(f"{before}{text}\n", reward=result.reward or 0.0, done=result.done)
