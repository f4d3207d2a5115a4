"""Plugin of pytest that gives slime's contract tests a run; loaded with ``-p`` by slime's tests."""

import contextlib
import tempfile
from pathlib import Path
from typing import Any

import transformers  # noqa: F401  (or slime's tests put a stub in its place)

import tidegate
from tests.models import make_model_directory
from tidegate.integrations import slime


async def solve(episode: tidegate.Episode, sample: Any) -> float:
    """Two turns with an observation between them."""
    episode.append(sample.prompt)
    await episode.generate(max_tokens=4, stop_token_ids=[])
    episode.append("<42>")
    turn = await episode.generate(max_tokens=3, stop_token_ids=[])
    return float(len(turn.token_ids))


_stack = contextlib.ExitStack()


def pytest_configure() -> None:
    """Start a run, which ends with the tests."""
    from slime.utils.types import Sample

    model = make_model_directory(Path(tempfile.mkdtemp()) / "model")
    shape: dict[str, Any] = {"group_size": 2, "groups_per_batch": 2, "max_staleness": 1}
    run = _stack.enter_context(tidegate.serve_sync(model=model, **shape))
    slime.use_run(run, episode=solve, evaluation={"held out": [Sample(index=0, prompt="one")]})


def pytest_unconfigure() -> None:
    """End the run."""
    _stack.close()
