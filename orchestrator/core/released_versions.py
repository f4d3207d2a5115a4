"""Which engines may serve which version of one adapter that the run trains.

:class:`TurnTracker` has one for each trained adapter. Each adapter counts its own versions; for the
run's weights, :class:`TurnTracker` itself has ``live_version``.
"""

from collections.abc import Iterable


class ReleasedVersions:
    """Released and live versions of one adapter."""

    def __init__(self) -> None:
        self.released = 0
        """Newest version that every engine has loaded; 0 before the first, when no turn runs."""
        self.live_version = 0
        """Oldest version that may sample a turn submitted now. Never falls."""
        self.held: dict[str, int] = {}
        """Engine -> version, for engines that may still serve an older one than ``released``."""

    @property
    def is_served(self) -> bool:
        """Whether turns can run: a version is released, and the trainer has not lost it since."""
        return 0 < self.live_version <= self.released

    @property
    def behind(self) -> set[str]:
        """Engines that serve a version older than ``live_version``, and get no turns: they missed
        a publish while they were away."""
        return {engine for engine, version in self.held.items() if version < self.live_version}

    def release(self, version: int, engines: Iterable[str]) -> None:
        """Record that ``engines``, all of the run, have loaded a version and swap to it now."""
        if self.released:
            for engine in engines:
                self.held.setdefault(engine, self.released)
        self.released = version
        self._raise_live_version()

    def serve(self, engine: str, version: int) -> None:
        """Record that an engine serves a version from now on."""
        self._hold(engine, version)
        self._raise_live_version()

    def join(self, engine: str, version: int | None) -> None:
        """Record that an engine joined, holding ``version``; None: it gets the newest when it needs
        one."""
        self._hold(engine, self.released if version is None else version)
        self._raise_live_version()

    def leave(self, engine: str) -> None:
        """Forget an engine that has left."""
        if self.held.pop(engine, None) is not None:
            self._raise_live_version()

    def recall(self, live_version: int) -> None:
        """Let no version older than ``live_version``, which is not released yet, sample now."""
        self.live_version = max(self.live_version, live_version)

    def _hold(self, engine: str, version: int) -> None:
        if version < self.released:
            self.held[engine] = version
        else:
            self.held.pop(engine, None)

    def _raise_live_version(self) -> None:
        oldest = min([self.released, *self.held.values()])
        self.live_version = max(self.live_version, oldest)
