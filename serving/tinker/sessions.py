"""Sessions of the Tinker API.

A client opens a session, sends heartbeats while it runs, and makes models and samplers within it.
"""

from dataclasses import dataclass, field

from tidegate.serving.http.errors import ApiError
from tidegate.serving.tinker.models import TrainedModel
from tidegate.serving.tinker.samplers import Sampler

SESSION_TIMEOUT_S = 600.0
"""Time without a heartbeat after which a session ends. The SDK sends one every 10 s, and warns its
user after 120 s that the session will be ended."""

SILENT_S = 60.0
"""Time without a heartbeat after which a session without work makes room for another of its tenant:
its client was probably killed."""


@dataclass(slots=True, eq=False)
class TinkerSession:
    """A client's session."""

    session_id: str
    tenant: str
    seen_s: float
    """Loop time of the last heartbeat or request."""
    models: dict[int, TrainedModel] = field(default_factory=dict)
    """By ``model_seq_id``."""
    samplers: dict[int, Sampler] = field(default_factory=dict)
    """By ``sampling_session_seq_id``."""

    def model_id(self, seq_id: int) -> str:
        """Return the id of the model with this number, which the SDK expects to be this one."""
        return f"{self.session_id}:train:{seq_id}"

    def sampler_id(self, seq_id: int) -> str:
        """Return the id of the sampling session with this number."""
        return f"{self.session_id}:sample:{seq_id}"


class SessionTable:
    """All sessions that have not ended."""

    def __init__(self) -> None:
        self._sessions: dict[str, TinkerSession] = {}
        self.samplers: dict[str, Sampler] = {}
        """All sessions' samplers, by id."""

    def open(self, session_id: str, tenant: str, now_s: float) -> TinkerSession:
        """Begin a session, or go on with one that an earlier server began."""
        session = self._sessions[session_id] = TinkerSession(session_id, tenant, now_s)
        return session

    def get(self, session_id: str, tenant: str, now_s: float) -> TinkerSession:
        """Return a tenant's session, and record that its client is alive.

        Raises:
            ApiError: 410, the session has ended or belongs to another tenant.
        """
        session = self._sessions.get(session_id)
        if session is None or session.tenant != tenant:
            raise ApiError(
                410,
                f"session {session_id!r:.200} has ended or never was; without heartbeats it ends "
                f"after {SESSION_TIMEOUT_S:.0f} s. Create another tinker.ServiceClient",
            )
        session.seen_s = now_s
        return session

    def add_sampler(self, session: TinkerSession, seq_id: int, sampler: Sampler) -> None:
        """Add a sampler to its session.

        Raises:
            ApiError: 410, the session has ended.
        """
        if self._sessions.get(session.session_id) is not session:
            raise ApiError(410, f"session {session.session_id!r} has ended")
        session.samplers[seq_id] = self.samplers[sampler.sampler_id] = sampler

    def close(self, session: TinkerSession) -> None:
        """Forget a session and its samplers; harmless if repeated."""
        self._sessions.pop(session.session_id, None)
        for sampler in session.samplers.values():
            self.samplers.pop(sampler.sampler_id, None)

    def of(self, tenant: str) -> list[TinkerSession]:
        """Return a tenant's sessions, the newest first."""
        return [each for each in reversed(self._sessions.values()) if each.tenant == tenant]

    def silent(self, now_s: float, *, silent_s: float = SESSION_TIMEOUT_S) -> list[TinkerSession]:
        """Return the sessions whose clients have been silent for too long, the longest first."""
        due_s = now_s - silent_s
        silent = [session for session in self._sessions.values() if session.seen_s < due_s]
        return sorted(silent, key=lambda session: session.seen_s)
