"""A small OpenEnv server, run by a Python with OpenEnv: guess the word that the seed selects."""

import sys
from typing import Any

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    word: str


class Shown(Observation):
    shown: str


class Words(Environment[Guess, Shown, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._seed = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Shown:
        self._seed = seed or 0
        return Shown(shown=f"seed {seed}", reward=0.0, done=False)

    def step(self, action: Guess, timeout_s: float | None = None, **_: Any) -> Shown:
        if action.word == f"word {self._seed}":
            return Shown(shown="yes", reward=1.0, done=True)
        return Shown(shown=f"no: {action.word}", reward=0.0, done=False)

    @property
    def state(self) -> State:
        return State()


if __name__ == "__main__":
    app = create_fastapi_app(Words, Guess, Shown, max_concurrent_envs=8)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]))
