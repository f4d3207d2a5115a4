"""Probe of weight updates: compares an engine's output before, during and after other weights.

The only probe that changes an engine; runs only with `--update`. findings.py judges the result. It
loads the directories of :mod:`altered` through :class:`ExaminedEngine`.
"""

import secrets
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tidegate.cli.engine_doctor.examined import ExaminedEngine, ProbeRequest, ProbeResponse
from tidegate.cli.engine_doctor.measurements import Distance, UpdateProbe
from tidegate.cli.engine_doctor.probes import OUTPUT_TOKENS
from tidegate.errors import EngineLost

if TYPE_CHECKING:
    from tidegate.cli.engine_doctor.reference import Reference


def weight_update(
    engine: ExaminedEngine,
    prompt: tuple[int, ...],
    *,
    served: tuple[Path, "Reference"],
    other: tuple[Path, "Reference"],
    progress: Callable[[str], None],
) -> UpdateProbe:
    """Load ``other`` weights, then the ``served`` ones again, and send the prompt after each.

    The first update clears the engine's cache and the second does not, to show what the cache does
    by itself. Afterwards the engine has its original weights and an empty cache.

    Raises:
        EngineLost: the engine stopped responding, or could not be given its weights again.
    """
    # First the weights it already has: an engine that refuses updates then loses nothing.
    if (refused := _load(engine, served[0])) is not None:
        return UpdateProbe(refused=refused)
    request = ProbeRequest(token_ids=prompt, tokens_max=OUTPUT_TOKENS)
    engine.generate(request)  # puts the prompt's KV into the cache, if there is one
    try:
        if (refused := _load(engine, other[0])) is not None:
            return UpdateProbe(refused=refused)
        progress("generating with other weights")
        cleared = _distance(engine.generate(request), prompt, other[1], served[1])
        _restore_weights(engine, served[0], clears_cache=False)
        progress("generating with its own weights again")
        kept = _distance(engine.generate(request), prompt, served[1], other[1])
        salt = f"doctor-{secrets.token_hex(4)}"
        salted = engine.generate(replace(request, cache_salt=salt))
        return UpdateProbe(
            cleared=cleared,
            kept=kept,
            salted=_distance(salted, prompt, served[1], other[1]),
        )
    finally:
        _restore_weights(engine, served[0], clears_cache=True)


def _load(engine: ExaminedEngine, directory: Path, *, clears_cache: bool = True) -> str | None:
    """Return None, or why the engine refuses."""
    return engine.load_weights(directory.resolve(), clears_cache=clears_cache)


def _restore_weights(engine: ExaminedEngine, directory: Path, *, clears_cache: bool) -> None:
    try:
        why = _load(engine, directory, clears_cache=clears_cache)
    except EngineLost as error:
        why = str(error)
    if why is not None:
        raise EngineLost(
            f"the engine did not get its own weights back from {directory.resolve()}: {why}. "
            f"Restart it, because it serves other weights now"
        )


def _distance(
    response: ProbeResponse, prompt: tuple[int, ...], now: "Reference", before: "Reference"
) -> Distance:
    """Compare on the engine's own tokens, teacher-forced in float32."""
    of_now = now.logprobs(prompt, response.token_ids)
    of_before = before.logprobs(prompt, response.token_ids)
    return Distance(
        from_new=_mean_difference(response.logprobs, of_now),
        from_old=_mean_difference(response.logprobs, of_before),
        between=_mean_difference(of_now, of_before),
    )


def _mean_difference(first: tuple[float, ...] | list[float], second: list[float]) -> float:
    return sum(abs(a - b) for a, b in zip(first, second, strict=True)) / len(second)
