"""Whose weights computed each KV position of a turn? Knows versions and positions, no tensors."""

from tidegate.transport.messages import KvSpan


class KvHistory:
    """The versions of one turn's KV, as runs over its context positions.

    Only runs that ended with a weight swap are kept; what lies past them was computed by the live
    weights. So a decode step costs nothing here.
    """

    __slots__ = ("_closed",)

    def __init__(self) -> None:
        self._closed: list[KvSpan] = []

    def spans(self, live_version: int, end: int) -> list[KvSpan]:
        """Runs over the positions ``[0, end)``, gapless, in order."""
        closed = self._closed
        start = closed[-1].end if closed else 0
        if end <= start:
            return closed.copy()
        if closed and closed[-1].version == live_version:
            return [*closed[:-1], KvSpan(live_version, closed[-1].start, end)]
        return [*closed, KvSpan(live_version, start, end)]

    def swap(self, old_version: int, end: int) -> None:
        """The weights ``old_version`` stop here, with the positions ``[0, end)`` computed."""
        self._closed = self.spans(old_version, end)

    def drop_other_than(self, version: int) -> int:
        """Forget all but the leading positions computed by ``version``; return their number.

        A position attends to all before it, so what ``version`` computed later is not fresh.
        """
        leading = self._closed[:1]
        if leading and leading[0].version != version:
            leading = []
        self._closed = leading
        return leading[0].end if leading else 0

    def clear(self) -> None:
        """The KV is gone."""
        self._closed = []
