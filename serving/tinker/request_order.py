"""Sans-IO order of one model's training requests: by ``seq_id``, each once, one at a time.

The SDK numbers a model's requests from 1, sends several at once, and sends a request again when an
answer is lost.
"""

from dataclasses import dataclass, field
from typing import Generic, TypeVar

from tidegate.serving.http.errors import ApiError

WAITING_MAX = 1024
"""A request may be this far ahead of the one that starts next; the SDK is asked to retry others."""

SEQ_ID_MAX = 10**9
"""Largest number of a model's request."""

DIGESTS_MAX = 1024
"""Digests that are kept of requests that have started. An older request that comes again is taken
for the one that was carried out."""

Work = TypeVar("Work")


@dataclass(slots=True)
class RequestOrder(Generic[Work]):
    """Requests of one model. ``Work`` is what the caller starts for each.

    Invariants: ``seq_id``s below ``next_seq_id`` were started, in order; at most one runs; what
    waits has a higher ``seq_id``, or the next one while another runs.
    """

    next_seq_id: int
    """Number of the request to start next."""
    is_running: bool = False
    _waiting: dict[int, Work] = field(default_factory=dict)
    _digests: dict[int, bytes] = field(default_factory=dict)
    """Digests of requests' bodies, by ``seq_id``."""

    def is_known(self, seq_id: int, digest: bytes) -> bool:
        """Whether this request has arrived before.

        Raises:
            ApiError: another request had this number, or none may have it.
        """
        if not 1 <= seq_id <= SEQ_ID_MAX:
            raise ApiError(
                400,
                f"a model's requests are numbered from 1, up to {SEQ_ID_MAX}, got seq_id {seq_id}",
            )
        known = self._digests.get(seq_id)
        if known is None:
            return seq_id < self.next_seq_id
        if known != digest:
            raise ApiError(
                400,
                f"seq_id {seq_id} was used by another request of this model; number each request "
                f"once, and send it again unchanged",
            )
        return True

    def refuse_distant(self, seq_id: int) -> None:
        """Raise ApiError 429 if a new request is too far ahead, so that too many would wait."""
        if seq_id >= self.next_seq_id + WAITING_MAX:
            raise ApiError(
                429,
                f"seq_id {seq_id} is too far ahead: the model's request {self.next_seq_id} starts "
                f"next, and those below {self.next_seq_id + WAITING_MAX} may wait; retry later",
            )

    def arrived(self, seq_id: int, digest: bytes, work: Work) -> Work | None:
        """Add a request that is not known yet; return the work to start now, if there is any.

        There is no limit here, because an earlier server has accepted the requests of a journal.

        Raises:
            ApiError: another request had this number.
        """
        assert not self.is_known(seq_id, digest)
        self._digests[seq_id] = digest
        self._waiting[seq_id] = work
        return self._start()

    def finished(self) -> Work | None:
        """Record that the running request has ended; return the work to start now, if any."""
        assert self.is_running
        self.is_running = False
        return self._start()

    def waiting(self) -> list[Work]:
        """Return the requests that have not started, in order."""
        return [self._waiting[seq_id] for seq_id in sorted(self._waiting)]

    def drain(self) -> list[Work]:
        """Return the requests that have not started, in order, and forget them."""
        waiting = self.waiting()
        self._waiting.clear()
        return waiting

    def _start(self) -> Work | None:
        if self.is_running or self.next_seq_id not in self._waiting:
            return None
        self.is_running = True
        self._digests.pop(self.next_seq_id - DIGESTS_MAX, None)
        self.next_seq_id += 1
        return self._waiting.pop(self.next_seq_id - 1)
