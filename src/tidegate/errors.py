"""Every error Tidegate raises on purpose.

TidegateError
├── ConfigError             settings that can't work                    (also ValueError)
├── ModelError              a model directory that can't be loaded      (also ValueError)
│   └── ModelNotComputed    our own code doesn't compute it; others may (also ValueError)
├── BadFrame                a peer sent bytes we cannot read            (also ValueError)
├── WeightsRefused          published weights that don't fit the model  (also ValueError)
├── AddressInUse            the orchestrator's address is taken         (also OSError)
├── TurnRefused             an engine can never serve this turn         (also ValueError)
├── TurnTimeout             a turn took longer than it was given        (also TimeoutError)
├── ChatRefused             messages that can't become a prompt         (also ValueError)
├── ScoreRefused            an engine can never score this as asked     (also ValueError)
├── OutOfBlocks             a turn can never fit the KV cache           (also MemoryError)
├── OutOfMemory             the machine has no memory for an engine     (also MemoryError)
├── RankLost                a rank of an engine ended, or is stuck      (also ConnectionError)
├── TritonMissing           a GPU's kernel was launched without Triton  (also ImportError)
├── NotUnderstood           what an engine says is refused each time    (also ConnectionError)
├── EngineLost              an engine stopped answering                 (also ConnectionError)
├── EngineGone              an engine behind an adapter answers no more (also ConnectionError)
├── EngineHeld              it takes no requests while it is paused     (also RuntimeError)
├── EngineStartFailed       an engine process ended before it was ready (also RuntimeError)
├── EngineLagging           an engine did not take up new weights       (also TimeoutError)
├── SleepFailed             an engine can't sleep, or wake, as asked    (also RuntimeError)
├── PublishDropped          published weights gave way to newer ones     (also RuntimeError)
├── PublishNeeded           a batch was asked for that can't fill yet    (also RuntimeError)
├── PolicyBroken            a user's staleness policy contradicts itself (also RuntimeError)
├── EnvironmentFailed       an environment raised, or answered nonsense (also RuntimeError)
│   ├── EnvironmentHung     it gave no answer in time                   (also TimeoutError)
│   ├── EnvironmentCrashed  its process died under it                   (also RuntimeError)
│   └── NotRepeatable       begun again, it went another way            (also RuntimeError)
├── PackageMissing          an environment's package is not installed   (also ImportError)
├── EpisodeError            a user's episode fails every time           (also RuntimeError)
├── RunBlocked              the user's code keeps the run's loop to itself (also TimeoutError)
├── TrainerLost             a remote trainer, or a rank of it, is gone  (also ConnectionError)
├── RunLost                 a remote trainer's run stopped answering    (also ConnectionError)
├── RunClosed               the run has ended; nothing more can be asked of it (also RuntimeError)
├── RunForked               a forked process uses its parent's run      (also RuntimeError)
├── NothingLeftToHappen     a simulated program waits for ever          (also RuntimeError)
├── VirtualTimeUp           a simulated program takes for ever          (also TimeoutError)
├── ResumeMismatch          the run can't be resumed from there          (also ValueError)
├── JournalError            the journal can't be used as asked
│   ├── JournalMissing      there is none where one is to be opened     (also FileNotFoundError)
│   ├── JournalExists       there is one where one is to be made        (also FileExistsError)
│   ├── JournalLocked       another run is using it                     (also BlockingIOError)
│   ├── JournalCorrupt      its bytes are not what was written          (also ValueError)
│   ├── JournalTooNew       a newer Tidegate wrote it                   (also NotImplementedError)
│   ├── JournalFailed       the disk refused to read or write it        (also OSError)
│   └── JournalBehind       the disk is too slow for what is appended   (also TimeoutError)
├── RecordingFailed         a run's records can't be written            (also OSError)
└── AuditError              a run directory that can't be audited       (also ValueError)

Each says what was wrong, with its value, and what to do about it.
"""

import os
from collections.abc import Mapping
from pathlib import Path


class TidegateError(Exception):
    """Base class: catch it to separate our failures from anyone else's."""


class ConfigError(TidegateError, ValueError):
    """Settings that contradict each other or can never work."""


class ModelError(TidegateError, ValueError):
    """A model directory that is missing, damaged, or of an architecture we don't run."""


class ModelNotComputed(ModelError):
    """A model that is sound, but not one of those that the engine's own code computes."""


class BadFrame(TidegateError, ValueError):
    """A peer sent bytes that are not one of our messages."""


class WeightsRefused(TidegateError, ValueError):
    """Published weights that don't fit the model: names, shapes or dtypes. The old ones stay."""


class AddressInUse(TidegateError, OSError):
    """Another process listens where the orchestrator was told to."""

    def __init__(self, address: str) -> None:
        self.address = address
        super().__init__(
            f"{address} is in use by another process; choose another address, or leave "
            f"`address` out to get a private one"
        )


class ChatRefused(TidegateError, ValueError):
    """Messages or tools that the model's chat template, or Tidegate, can make no prompt of."""


class TurnTimeout(TidegateError, TimeoutError):
    """A turn took longer than its ``timeout_s``; what it sampled stays in the context."""

    def __init__(self, *, timeout_s: float, tokens: int) -> None:
        self.timeout_s = timeout_s
        self.tokens = tokens
        super().__init__(
            f"the turn had {timeout_s:g} s and sampled {tokens} tokens in that time; give it more, "
            f"or fewer max_tokens"
        )


class TurnRefused(TidegateError, ValueError):
    """An engine can never serve this turn as asked."""


class ScoreRefused(TidegateError, ValueError):
    """An engine can never score these tokens as asked, or what its model computed is no number."""


class OutOfBlocks(TidegateError, MemoryError):
    """A turn can never fit the KV cache, however long it waits."""

    def __init__(self, *, blocks_needed: int, blocks_total: int, block_tokens: int) -> None:
        self.blocks_needed = blocks_needed
        self.blocks_total = blocks_total
        self.block_tokens = block_tokens
        super().__init__(
            f"turn needs {blocks_needed} KV blocks of {block_tokens} tokens but the whole cache "
            f"has {blocks_total}; shorten the prompt, lower max_tokens, or give the engine more "
            f"blocks (num_blocks)"
        )


class OutOfMemory(TidegateError, MemoryError):
    """The machine, or its accelerator, has no memory left for what an engine was about to do."""

    def __init__(self, *, doing: str, remedy: str, why: str) -> None:
        self.doing = doing
        super().__init__(f"out of memory {doing}; {remedy} ({why})")


class RankLost(TidegateError, ConnectionError):
    """An engine can't go on without one of its ranks: each computes a part of every layer."""

    def __init__(self, *, rank: int, ranks: int, why: str) -> None:
        self.rank = rank
        self.ranks = ranks
        super().__init__(
            f"a rank of this engine of {ranks} is gone, or stuck, as rank {rank} saw: {why}. The "
            f"engine ends, and its turns go on elsewhere"
        )


class TritonMissing(TidegateError, ImportError):
    """A kernel was launched on a GPU, and Triton, which compiles it, is not installed."""

    def __init__(self, kernel: str) -> None:
        self.kernel = kernel
        super().__init__(
            f"{kernel} runs on a GPU by Triton, which is not installed; install it with "
            f"pip install 'tidegate[gpu]', or keep the tensors on the CPU"
        )


class NotUnderstood(TidegateError, ConnectionError):
    """The orchestrator has refused what an engine says, and each repetition of it."""

    def __init__(self, *, times: int, seq: int, why: str) -> None:
        self.times = times
        self.seq = seq
        super().__init__(
            f"the orchestrator complained {times} times and took in no step from {seq} on, though "
            f"they were sent again; it said: {why}. Run the same version of Tidegate on both ends"
        )


class EngineLost(TidegateError, ConnectionError):
    """An engine stopped answering, and no other is left to take its turns."""


class EngineGone(TidegateError, ConnectionError):
    """An engine behind an adapter is dead, silent, or in a state that nobody can vouch for."""


class EngineHeld(TidegateError, RuntimeError):
    """An engine behind an adapter takes no requests now, for it is paused; later it will."""


class EngineStartFailed(TidegateError, RuntimeError):
    """An engine process ended, or was too slow, before it was ready to serve."""

    def __init__(self, *, engine: str, why: str) -> None:
        self.engine = engine
        self.why = why
        super().__init__(f"engine {engine!r} did not start: {why}")


class EngineLagging(TidegateError, TimeoutError):
    """An engine still serves old weights after the time allowed for an update."""

    def __init__(
        self, *, engines: list[str], wanted_version: int, waited_s: float, where: str
    ) -> None:
        self.engines = engines
        self.wanted_version = wanted_version
        self.waited_s = waited_s
        super().__init__(
            f"{', '.join(engines)} still without weights v{wanted_version}, {waited_s:.0f} s after "
            f"it was published ({where}); check the engine's log, or raise weights_timeout_s if "
            f"loading this model really takes longer"
        )


class SleepFailed(TidegateError, RuntimeError):
    """An engine could not give its memory back, or has none to wake in."""

    def __init__(self, *, what: str, failures: Mapping[str, str]) -> None:
        self.failures = dict(failures)
        """Engine -> what it said. The others have done as asked."""
        said = "; ".join(f"{engine}: {why}" for engine, why in sorted(failures.items()))
        super().__init__(
            f"{len(failures)} engines could not {what} ({said}). All stay paused: mend that, then "
            f"call wake(), which has all go on"
        )


class PublishDropped(TidegateError, RuntimeError):
    """Weights that were published gave way to newer ones, which never came."""

    def __init__(self, *, version: int) -> None:
        self.version = version
        super().__init__(
            f"weights v{version} were given up for newer ones while engines still copied them, and "
            f"the newer ones could not be written; the old ones serve on: publish again"
        )


class PublishNeeded(TidegateError, RuntimeError):
    """The trainer waits for a batch that can't fill before it publishes the last ones."""

    def __init__(self, *, unpublished_groups: int, outstanding_groups_max: int) -> None:
        self.unpublished_groups = unpublished_groups
        self.outstanding_groups_max = outstanding_groups_max
        super().__init__(
            f"{unpublished_groups} of the {outstanding_groups_max} groups that may be outstanding "
            f"were handed to the trainer and not published; no further batch can fill. Call "
            f"publish() after each batch, or raise max_staleness by the batches you train on "
            f"between two publishes"
        )


class PolicyBroken(TidegateError, RuntimeError):
    """A staleness policy has chosen what it may not choose."""


class EnvironmentFailed(TidegateError, RuntimeError):
    """An environment could not go on. Its episode fails; no other is hurt."""

    def __init__(self, *, environment: str, doing: str, why: str) -> None:
        self.environment = environment
        self.doing = doing
        """``reset``, ``step 3``, …"""
        super().__init__(f"environment {environment}, {doing}: {why}")


class EnvironmentHung(EnvironmentFailed, TimeoutError):
    """An environment gave no answer in time; where it blocked its process, that was killed."""


class EnvironmentCrashed(EnvironmentFailed):
    """The process died that an environment was in, and most likely because of it."""


class NotRepeatable(EnvironmentFailed):
    """The same seed, task and actions gave other observations than before its process died."""


class PackageMissing(TidegateError, ImportError):
    """An adapter was used, and the package that it adapts is not installed."""

    def __init__(self, package: str, why: str) -> None:
        self.package = package
        super().__init__(
            f"this environment needs the package {package!r}: pip install '{package}', here or "
            f"into the Python that the pool is given ({why})"
        )


class EpisodeError(TidegateError, RuntimeError):
    """The user's episode failed many times in a row without one success."""


class RunBlocked(TidegateError, TimeoutError):
    """Code that never awaits has kept the run's event loop to itself for too long."""

    def __init__(self, *, who: str, where: str, limit_s: float) -> None:
        self.who = who
        self.where = where
        self.limit_s = limit_s
        super().__init__(
            f"{who} has kept the run's event loop to itself for {limit_s:.0f} s, in {where}; an "
            f"episode must await asyncio.to_thread(...) for what computes or blocks for long"
        )


class RunClosed(TidegateError, RuntimeError):
    """The run has ended; nothing more can be asked of it."""


class RunForked(TidegateError, RuntimeError):
    """A forked process uses a run, or a connection to one, that its parent process has.

    A run lives on a thread, and ``fork()`` copies no threads, so nobody would ever answer.
    """


def check_not_forked(owner_pid: int) -> None:
    """Refuse use in a process that was forked from the owner's.

    Raises:
        RunForked: this process is not ``owner_pid``.
    """
    pid = os.getpid()
    if pid != owner_pid:
        raise RunForked(
            f"this run belongs to process {owner_pid}, and process {pid} was forked from it: the "
            f"run's thread, sockets and engines stay there. Use the run in process {owner_pid} "
            f"only; start worker processes with the 'spawn' method, or give them batches and not "
            f"the run (torch's DataLoader: num_workers=0)"
        )


class TrainerLost(TidegateError, ConnectionError):
    """A trainer in another process, or one of its data-parallel ranks, is gone."""

    def __init__(self, *, ranks: list[int], world_size: int, doing: str, why: str) -> None:
        self.ranks = ranks
        who = f"{', '.join(f'rank {rank}' for rank in ranks)} of {world_size}"
        super().__init__(
            f"{doing}: {who} {why}; start what is missing again, with the same rank and "
            f"world_size: what it had not done with is given to it again"
        )


class RunLost(TidegateError, ConnectionError):
    """The run that a trainer in another process is connected to stopped answering."""


class NothingLeftToHappen(TidegateError, RuntimeError):
    """In virtual time everybody waits, and nothing is scheduled that could wake anyone."""

    def __init__(self, *, waiting: list[str]) -> None:
        self.waiting = waiting
        super().__init__(
            f"nothing is scheduled any more, and {len(waiting)} tasks wait for ever: "
            f"{'; '.join(waiting)}"
        )


class ResumeMismatch(TidegateError, ValueError):
    """What the trainer goes on from and what the journal holds don't belong together."""


class JournalError(TidegateError):
    """The journal can't be used as asked. Nothing that it told as committed is lost by this."""


class JournalMissing(JournalError, FileNotFoundError):
    """There is no journal where one is to be opened."""

    def __init__(self, *, path: Path) -> None:
        self.path = path
        super().__init__(
            f"there is no journal at {path}: nothing was committed there, so there is nothing to "
            f"resume; check the path, or start a new run"
        )


class JournalExists(JournalError, FileExistsError):
    """There is a journal, or some other file, where a new one is to be made."""

    def __init__(self, *, path: Path) -> None:
        self.path = path
        super().__init__(
            f"{path} exists already; resume that run, or choose another directory for a new one"
        )


class JournalLocked(JournalError, BlockingIOError):
    """Another run is using the journal."""

    def __init__(self, *, path: Path, holder: str) -> None:
        self.path = path
        self.holder = holder
        super().__init__(
            f"{path} is in use by {holder}; two runs can't share a journal: end that one first, or "
            f"choose another directory"
        )


class JournalCorrupt(JournalError, ValueError):
    """The journal's bytes are not what was written."""

    def __init__(self, *, path: Path, where: str, intact_lsn: int | None = None) -> None:
        self.path = path
        self.where = where
        self.intact_lsn = intact_lsn
        """Records up to this one can still be read; None: not known, or not a journal at all."""
        remedy = (
            "restore a copy of it"
            if intact_lsn is None
            else f"records up to {intact_lsn} are intact: restore a copy of it, or put them into a "
            f"new file with `python -m tidegate.orchestrator.journal.salvage {path} NEW_FILE` and "
            f"resume from a checkpoint that is not newer"
        )
        super().__init__(f"{path} is damaged: {where}; {remedy}")


class JournalTooNew(JournalError, NotImplementedError):
    """A newer Tidegate wrote the journal."""

    def __init__(self, *, path: Path, found: int, known: int) -> None:
        self.path = path
        self.found = found
        self.known = known
        super().__init__(
            f"{path} has schema version {found}, and this Tidegate knows versions up to {known}; "
            f"resume it with the Tidegate that wrote it, or a later one"
        )


class JournalFailed(JournalError, OSError):
    """The disk refused to read or write the journal."""

    def __init__(self, *, path: Path, why: str) -> None:
        self.path = path
        self.why = why
        super().__init__(
            f"{path} can't be used: {why}. All that was told as committed is there; make room or "
            f"mend the disk, then resume the run"
        )


class RecordingFailed(TidegateError, OSError):
    """A file of a run's records can't be written."""

    def __init__(self, *, path: Path, why: str) -> None:
        self.path = path
        self.why = why
        super().__init__(
            f"{path} can't be written: {why}. What was recorded before is readable; make room or "
            f"mend the disk, or leave out run_directory to go on without records"
        )


class JournalBehind(JournalError, TimeoutError):
    """The disk is too slow for what is appended."""

    def __init__(self, *, path: Path, pending_bytes: int, why: str) -> None:
        self.path = path
        self.pending_bytes = pending_bytes
        super().__init__(
            f"{pending_bytes / 1e6:.1f} MB wait to be written to {path}: {why}; the disk hangs, or "
            f"is too slow for this run"
        )


class VirtualTimeUp(TidegateError, TimeoutError):
    """A simulated program goes on and on, and doesn't end."""

    def __init__(self, *, limit_s: float, waiting: list[str]) -> None:
        self.limit_s = limit_s
        self.waiting = waiting
        super().__init__(
            f"{limit_s:.0f} virtual seconds have passed without an end, and {len(waiting)} tasks "
            f"wait: {'; '.join(waiting)}"
        )


class AuditError(TidegateError, ValueError):
    """A run directory that can't be audited: files missing, or not of this format."""
