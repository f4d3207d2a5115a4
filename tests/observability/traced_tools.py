"""Tools and an environment for worker processes that return the trace they are called in."""

from opentelemetry import trace

import tidegate


def trace_id() -> str:
    """Return the trace of the call."""
    return f"{trace.get_current_span().get_span_context().trace_id:032x}"


def find() -> str:
    """Return the trace of a plain call."""
    return trace_id()


async def search() -> str:
    """Return the trace of an async call."""
    return trace_id()


def fail() -> str:
    """Fail, as tools do."""
    raise LookupError("no such door")


class Maze:
    """Ends at the first step; its text is the trace of the step."""

    def reset(self, *, seed: int, task: object) -> tidegate.Observation:
        """Return the trace of the reset."""
        return tidegate.Observation(trace_id())

    def step(self, action: str) -> tidegate.Observation:
        """Return the trace of the step."""
        return tidegate.Observation(trace_id(), done=True)

    def close(self) -> None:
        """Do nothing."""
