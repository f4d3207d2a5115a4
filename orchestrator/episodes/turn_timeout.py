"""How is a turn given so long and no longer? What becomes of it then is for who asked."""

import asyncio
from collections.abc import Awaitable

from tidegate.errors import TurnTimeout
from tidegate.orchestrator.core.rollout import Rollout, Turn


async def within(timeout_s: float, coming: Awaitable[Turn], rollout: Rollout) -> Turn:
    """The turn that ``rollout`` waits for.

    Raises:
        TurnTimeout: it took longer.
    """
    clock = asyncio.timeout(timeout_s)
    try:
        async with clock:
            return await coming
    except TimeoutError:
        if not clock.expired():
            raise
        raise TurnTimeout(timeout_s=timeout_s, tokens=rollout.turns[-1].length) from None
