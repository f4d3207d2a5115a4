"""Error types that Tidegate raises, one tree under :class:`TidegateError`.

TidegateError
├── ConfigError             settings are invalid or contradict each other   (also ValueError)
│   ├── SandboxUnavailable  this machine can't start any sandbox            (also RuntimeError)
│   ├── PublishUnclear      a publish doesn't say what it was made from     (also ValueError)
│   └── BatchNotHeld        a publish names a batch that can't be in it     (also ValueError)
├── ModelError              a model directory cannot be loaded              (also ValueError)
│   └── ModelNotComputed    the built-in engine lacks this architecture     (also ValueError)
├── BadFrame                a peer sent an unreadable message               (also ValueError)
├── WeightsRefused          published weights do not fit the model          (also ValueError)
├── AddressInUse            the orchestrator's address is taken             (also OSError)
├── TurnRefused             an engine can never serve this turn             (also ValueError)
│   ├── ContextFull         its context is as long as engines read          (also ValueError)
│   └── ImageRefused        an image can't be read      (also ChatRefused, ValueError)
├── TurnTimeout             a turn exceeded its time limit                  (also TimeoutError)
├── ChatRefused             messages cannot be rendered as a prompt         (also ValueError)
├── ScoreRefused            an engine can never score this request          (also ValueError)
├── OutOfBlocks             a turn can never fit the KV cache               (also MemoryError)
├── OutOfMemory             an engine's memory allocation failed            (also MemoryError)
├── RankLost                a rank of an engine died or hangs               (also ConnectionError)
├── TritonMissing           a GPU kernel needs Triton, not installed        (also ImportError)
├── NotUnderstood           the orchestrator keeps refusing an engine's steps (also ConnectionError)
├── EngineLost              an engine stopped answering                     (also ConnectionError)
├── EngineGone              an external engine stopped answering            (also ConnectionError)
├── EngineHeld              an external engine is paused                    (also RuntimeError)
├── EngineStartFailed       an engine process ended before it was ready     (also RuntimeError)
├── EngineLagging           an engine did not load new weights in time      (also TimeoutError)
├── SleepFailed             an engine could not sleep or wake               (also RuntimeError)
├── PublishDropped          published weights were superseded               (also RuntimeError)
├── VersionUnavailable      no engine can evaluate a weight version         (also LookupError)
├── PublishNeeded           no batch can fill before the next publish       (also RuntimeError)
├── PolicyBroken            a user's policy object broke its contract       (also RuntimeError)
├── EnvironmentFailed       an environment raised, or returned nonsense     (also RuntimeError)
│   ├── EnvironmentHung     it did not answer in time                       (also TimeoutError)
│   ├── EnvironmentCrashed  its process died                                (also RuntimeError)
│   └── NotRepeatable       its replay gave different observations          (also RuntimeError)
├── PackageMissing          an environment's package is not installed       (also ImportError)
├── EpisodeError            a user's episode fails every time               (also RuntimeError)
├── PolicyFailed            an episode ends because of what the model did   (also RuntimeError)
│   └── SandboxFileError    programs left no such file, or a full disk      (also OSError)
├── InfrastructureFailed    an episode ends because of a tool, grader, …    (also RuntimeError)
│   └── SandboxLost         a sandbox ended, not by its program's doing     (also ConnectionError)
├── RunBlocked              user code blocks the run's event loop           (also TimeoutError)
├── TrainerLost             a remote trainer, or a rank of it, is gone      (also ConnectionError)
├── RunLost                 a remote trainer's run stopped answering        (also ConnectionError)
├── RunClosed               the run has ended                               (also RuntimeError)
├── RunForked               a forked process uses its parent's run          (also RuntimeError)
├── NothingLeftToHappen     a simulated program is deadlocked               (also RuntimeError)
├── VirtualTimeUp           a simulated program exceeded its time limit     (also TimeoutError)
├── ResumeMismatch          checkpoint and journal do not match             (also ValueError)
├── JournalError            the journal cannot be used as requested
│   ├── JournalMissing      no journal exists at the path to open           (also FileNotFoundError)
│   ├── JournalExists       a file exists at the path to create             (also FileExistsError)
│   ├── JournalLocked       another run uses the journal                    (also BlockingIOError)
│   ├── JournalCorrupt      the journal's bytes are damaged                 (also ValueError)
│   ├── JournalTooNew       a newer Tidegate wrote the journal           (also NotImplementedError)
│   ├── JournalFailed       the disk failed a read or write                 (also OSError)
│   └── JournalBehind       the disk is slower than the appends             (also TimeoutError)
├── RecordingFailed         a run's recording cannot be written             (also OSError)
└── AuditError              a run directory cannot be audited               (also ValueError)

Each message states what was wrong, the offending value, and what to do about it.
"""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path


class TidegateError(Exception):
    """Base class of all errors that Tidegate raises on purpose."""


class ConfigError(TidegateError, ValueError):
    """Settings contradict each other, or can never work."""


class ModelError(TidegateError, ValueError):
    """A model directory is missing, damaged, or of an unsupported architecture."""


class ModelNotComputed(ModelError):
    """The model is valid, but the built-in engine does not implement its architecture."""


class BadFrame(TidegateError, ValueError):
    """A peer sent bytes that do not decode as a Tidegate message."""


class WeightsRefused(TidegateError, ValueError):
    """Published weights do not fit the model (names, shapes or dtypes). Engines keep the old
    weights."""


class AddressInUse(TidegateError, OSError):
    """Another process listens on the address that the orchestrator should bind."""

    def __init__(self, address: str) -> None:
        self.address = address
        super().__init__(
            f"{address} is in use by another process; choose another address, or leave "
            f"`listen_address` out to get a private one"
        )


class ChatRefused(TidegateError, ValueError):
    """The chat template, the tokenizer or Tidegate cannot make a prompt of these messages or
    tools."""


class TurnTimeout(TidegateError, TimeoutError):
    """A turn exceeded its ``timeout_s``. The tokens it sampled stay in the rollout's context."""

    def __init__(self, *, timeout_s: float, tokens: int) -> None:
        self.timeout_s = timeout_s
        self.tokens = tokens
        super().__init__(
            f"the turn had {timeout_s:g} s and sampled {tokens} tokens in that time; raise its "
            "timeout, or lower max_tokens"
        )


class TurnRefused(TidegateError, ValueError):
    """An engine can never serve this turn as requested."""


class ContextFull(TurnRefused):
    """A turn's context is as long as engines read, or longer than a message to an engine holds.

    ``tokens`` is a lower bound if a text was refused before it was tokenised.
    """

    def __init__(self, *, tokens: int, tokens_max: int) -> None:
        self.tokens = tokens
        self.tokens_max = tokens_max
        super().__init__(
            f"a context of {tokens} tokens, where engines read {tokens_max} together with what "
            "they sample; shorten the prompt, or what is appended to it"
        )


class ImageRefused(TurnRefused, ChatRefused):
    """An image of a context cannot be read, is too large, or has no place among the tokens."""


class ScoreRefused(TidegateError, ValueError):
    """An engine can never score these tokens as requested, or its model computed NaN or
    infinity."""


class OutOfBlocks(TidegateError, MemoryError):
    """A turn can never fit the KV cache, however long it waits."""

    def __init__(self, *, blocks_needed: int, blocks_total: int, block_tokens: int) -> None:
        self.blocks_needed = blocks_needed
        self.blocks_total = blocks_total
        self.block_tokens = block_tokens
        super().__init__(
            f"turn needs {blocks_needed} KV blocks of {block_tokens} tokens but the whole cache "
            f"has {blocks_total}; shorten the prompt, lower max_tokens, or raise num_kv_blocks"
        )


class OutOfMemory(TidegateError, MemoryError):
    """The machine, or its accelerator, has too little memory for an engine's next operation."""

    def __init__(self, *, doing: str, remedy: str, why: str) -> None:
        self.doing = doing
        super().__init__(f"out of memory {doing}; {remedy} ({why})")


class RankLost(TidegateError, ConnectionError):
    """A rank of a multi-rank engine died or hangs. Every layer needs all ranks, so the engine
    ends."""

    def __init__(self, *, rank: int, ranks: int, why: str) -> None:
        self.rank = rank
        self.ranks = ranks
        super().__init__(
            f"a rank of this engine of {ranks} has ended or hangs, according to rank {rank}: "
            f"{why}. The engine ends, and its turns continue on other engines"
        )


class TritonMissing(TidegateError, ImportError):
    """A kernel was launched on a GPU without Triton, which compiles it."""

    def __init__(self, kernel: str) -> None:
        self.kernel = kernel
        super().__init__(
            f"{kernel} runs on a GPU by Triton, which is not installed; install it with "
            f"pip install 'tidegate[gpu]', or keep the tensors on the CPU"
        )


class NotUnderstood(TidegateError, ConnectionError):
    """The orchestrator keeps refusing an engine's step messages, including their
    retransmissions."""

    def __init__(self, *, times: int, seq: int, why: str) -> None:
        self.times = times
        self.seq = seq
        super().__init__(
            f"the orchestrator rejected {times} messages and accepted no step from {seq} on, "
            f"although they were sent again: {why}. Run the same version of Tidegate on both "
            "ends"
        )


class EngineLost(TidegateError, ConnectionError):
    """An engine stopped answering, and no other engine is left to take its turns."""


class EngineGone(TidegateError, ConnectionError):
    """An engine behind an external-engine adapter is dead, silent, or in an unknown state."""


class EngineHeld(TidegateError, RuntimeError):
    """An engine behind an external-engine adapter refuses requests while it is paused; retry
    later."""


class EngineStartFailed(TidegateError, RuntimeError):
    """An engine process ended, or timed out, before it was ready to serve."""

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
            f"it was published ({where}); check the engine's log, or raise weight_update_timeout_s "
            f"if loading this model really takes longer"
        )


class SleepFailed(TidegateError, RuntimeError):
    """An engine could not release its memory to sleep, or could not allocate it to wake."""

    def __init__(self, *, what: str, failures: Mapping[str, str]) -> None:
        self.failures = dict(failures)
        """Error message by engine name. Engines not listed have done as requested."""
        reasons = "; ".join(f"{engine}: {why}" for engine, why in sorted(failures.items()))
        super().__init__(
            f"{len(failures)} engines could not {what} ({reasons}). All stay paused: fix the "
            "cause, then call wake(), which resumes them"
        )


class PublishDropped(TidegateError, RuntimeError):
    """Published weights were superseded by newer ones that could not be written."""

    def __init__(self, *, version: int) -> None:
        self.version = version
        super().__init__(
            f"weights v{version} were replaced by newer ones while engines copied them, and "
            "writing the newer ones failed; the old weights stay live: publish again"
        )


class VersionUnavailable(TidegateError, LookupError):
    """No engine serves the weight version that is to be evaluated."""

    def __init__(self, version: int, available: Sequence[int]) -> None:
        self.version = version
        self.available = tuple(available)
        """Versions that can be evaluated now."""
        if self.available:
            can = ", ".join(f"v{each}" for each in self.available)
            what = (
                f"engines for evaluations serve {can}; evaluate a version before the next publish"
            )
        else:
            what = "pinned evaluations need evaluation_engines, or a second engine"
        super().__init__(f"weights v{version} can't be evaluated: {what}")


class PublishNeeded(TidegateError, RuntimeError):
    """The trainer asked for a batch that cannot fill before it publishes the batches it has."""

    def __init__(
        self, *, unpublished_groups: int, outstanding_groups_max: int, held: Sequence[int] = ()
    ) -> None:
        self.unpublished_groups = unpublished_groups
        self.outstanding_groups_max = outstanding_groups_max
        self.held = tuple(held)
        """Numbers of the batches that no publish has named."""
        named = f"No publish has named {_batches(held)}. " if held else ""
        super().__init__(
            f"{unpublished_groups} of the {outstanding_groups_max} groups that may be outstanding "
            f"were handed to the trainer and not published; no further batch can fill. {named}Say "
            f"which batches a version was made from: publish(…, batches=[…]); or raise "
            f"max_staleness by the batches that you hold ahead"
        )


class PublishUnclear(ConfigError):
    """A publish does not say which batches its weights were made from, and several answers are
    possible."""

    def __init__(
        self, *, held: Sequence[int], batches_per_version: int, is_ahead: bool, has_lost: bool
    ) -> None:
        self.held = tuple(held)
        """Numbers of the batches that no publish has named."""
        first = ", ".join(map(str, held[:batches_per_version]))
        why = ", and has asked for one ahead" if is_ahead else ""
        why += ", and has lost one since it last named any" if has_lost else ""
        super().__init__(
            f"the trainer holds {_batches(held) if held else 'no batch'}{why}, and this publish "
            f"doesn't say which batches its weights were made from. Pass them: publish(…, "
            f"batches=[{first}]), or batches=[] for none. Only a trainer that takes "
            f"batches_per_version={batches_per_version} batches between two publishes, and asks "
            f"for none ahead, may leave it out"
        )


class BatchNotHeld(ConfigError):
    """A publish names a batch that its trainer doesn't hold, so the batch can't be in the weights,
    or must not be."""

    def __init__(self, *, batch: int, why: str, held: Sequence[int]) -> None:
        self.batch = batch
        self.held = tuple(held)
        """Numbers of the batches that a publish may name."""
        super().__init__(
            f"publish(batches=…) names batch {batch}, which {why}; nothing was published. A "
            f"publish may name {_batches(held) if held else 'no batch now'}. If the weights were "
            f"trained on batch {batch} all the same, restore those from before it"
        )


def _batches(numbers: Sequence[int]) -> str:
    return f"{'batch' if len(numbers) == 1 else 'batches'} {_numbers(numbers)}"


def _numbers(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


class PolicyBroken(TidegateError, RuntimeError):
    """A method of a policy object, such as a staleness policy's ``select``, returned something that
    it must not return."""


class EnvironmentFailed(TidegateError, RuntimeError):
    """An environment raised or returned an invalid answer. Only its own episode fails."""

    def __init__(self, *, environment: str, doing: str, why: str) -> None:
        self.environment = environment
        self.doing = doing
        """The call that failed, for example ``reset`` or ``step 3``."""
        super().__init__(f"environment {environment}, {doing}: {why}")


class EnvironmentHung(EnvironmentFailed, TimeoutError):
    """An environment did not answer in time. If it blocked its worker process, that was killed."""


class EnvironmentCrashed(EnvironmentFailed):
    """The worker process of an environment died, most likely because of that environment."""


class NotRepeatable(EnvironmentFailed):
    """Replaying an environment (same seed, task and actions) gave different observations."""


class PackageMissing(TidegateError, ImportError):
    """An environment adapter was used without the package that it adapts."""

    def __init__(self, package: str, why: str) -> None:
        self.package = package
        super().__init__(
            f"this environment needs the package {package!r}: pip install '{package}', here or "
            f"into the Python that the pool is given ({why})"
        )


class EpisodeError(TidegateError, RuntimeError):
    """The user's episode failed many times in a row, or by its own code before any success."""


REASON = re.compile("[a-z][a-z0-9_]{0,39}")
"""Pattern of a reason for which rollouts are discarded. It becomes an account of the ledger and a
Prometheus label."""


def _checked_reason(reason: str) -> str:
    if not REASON.fullmatch(reason):
        raise ConfigError(
            "a reason is up to 40 lowercase letters, digits and underscores, and begins with a "
            f"letter; got {reason!r}"
        )
    return reason


class PolicyFailed(TidegateError, RuntimeError):
    """Raised by an episode that ends because of what the model did, such as an invalid call.

    Its rollout gets the reward that the run's ``failure_policy`` gives.
    """

    def __init__(self, why: str = "the model gave up", *, reason: str = "gave_up") -> None:
        self.reason = _checked_reason(reason)
        super().__init__(why)


class InfrastructureFailed(TidegateError, RuntimeError):
    """Raised by an episode that ends because something outside the model failed, such as a tool.

    The episode begins again, as often as the run's ``failure_policy`` allows.
    """

    def __init__(self, why: str, *, reason: str = "tool_failed") -> None:
        self.reason = _checked_reason(reason)
        super().__init__(why)


class SandboxUnavailable(ConfigError, RuntimeError):
    """No sandbox of this kind can be started on this machine; the message says what to install."""


class SandboxLost(InfrastructureFailed, ConnectionError):
    """A sandbox could not be started or ended, through no fault of the program in it."""

    def __init__(self, why: str) -> None:
        super().__init__(why, reason="sandbox_lost")


class SandboxFileError(PolicyFailed, OSError):
    """A file in a sandbox can't be read or written, because of what programs did there."""

    def __init__(self, why: str) -> None:
        super().__init__(why, reason="sandbox_file")


class RunBlocked(TidegateError, TimeoutError):
    """User code that never awaits has blocked the run's event loop for too long."""

    def __init__(self, *, task_name: str, where: str, limit_s: float) -> None:
        self.task_name = task_name
        """Name of the asyncio task, such as ``rollout 7``."""
        self.where = where
        """Function and line of the code that blocks."""
        self.limit_s = limit_s
        super().__init__(
            f"{task_name} has kept the run's event loop to itself for {limit_s:.0f} s, in {where}; "
            f"an episode must await asyncio.to_thread(...) for what computes or blocks for long"
        )


class RunClosed(TidegateError, RuntimeError):
    """The run has ended and accepts no more requests."""


class RunForked(TidegateError, RuntimeError):
    """A forked process uses a run, or a connection to one, that belongs to its parent process.

    A run has a thread, and ``fork()`` copies no threads, so no call would ever be answered.
    """


def check_not_forked(owner_pid: int) -> None:
    """Raise unless this process owns the run.

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
    """A trainer in another process, or one of its data-parallel ranks, stopped answering."""

    def __init__(self, *, ranks: list[int], world_size: int, doing: str, why: str) -> None:
        self.ranks = ranks
        lost = f"{', '.join(f'rank {rank}' for rank in ranks)} of {world_size}"
        super().__init__(
            f"{doing}: {lost} {why}; restart the missing ranks with the same rank and world_size: "
            "they get their unfinished batches again"
        )


class RunLost(TidegateError, ConnectionError):
    """The run that this remote trainer is connected to stopped answering."""


class NothingLeftToHappen(TidegateError, RuntimeError):
    """A program in virtual time is deadlocked: all tasks wait and no timer is scheduled."""

    def __init__(self, *, waiting: list[str]) -> None:
        self.waiting = waiting
        super().__init__(
            f"nothing is scheduled any more, and {len(waiting)} tasks wait for ever: "
            f"{'; '.join(waiting)}"
        )


class ResumeMismatch(TidegateError, ValueError):
    """The trainer's checkpoint and the journal do not belong to the same run or position."""


class JournalError(TidegateError):
    """The journal cannot be used as requested. Records acknowledged as committed are not lost."""


class JournalMissing(JournalError, FileNotFoundError):
    """No journal exists at the path that should be opened."""

    def __init__(self, *, path: Path) -> None:
        self.path = path
        super().__init__(
            f"no journal at {path}: nothing was committed there; check the path, or start a new run"
        )


class JournalExists(JournalError, FileExistsError):
    """A journal, or another file, exists at the path where a new journal should be created."""

    def __init__(self, *, path: Path) -> None:
        self.path = path
        super().__init__(
            f"{path} exists already; resume that run (serve(resume=True), or `tidegate run --resume"
            f" {path.parent}`), or choose another directory for a new one"
        )


class JournalLocked(JournalError, BlockingIOError):
    """Another run holds the journal's lock."""

    def __init__(self, *, path: Path, holder: str) -> None:
        self.path = path
        self.holder = holder
        super().__init__(
            f"{path} is in use by {holder}; two runs can't share a journal: end that one first, or "
            f"choose another directory"
        )


class JournalCorrupt(JournalError, ValueError):
    """The journal's bytes differ from what was written."""

    def __init__(self, *, path: Path, where: str, intact_lsn: int | None = None) -> None:
        self.path = path
        self.where = where
        self.intact_lsn = intact_lsn
        """Last record (log sequence number) that is still readable; None if unknown or not a
        journal."""
        remedy = (
            "restore a copy of it"
            if intact_lsn is None
            else f"records up to {intact_lsn} are intact: restore a copy of it, or put them into a "
            f"new file with `python -m tidegate.orchestrator.journal.salvage {path} NEW_FILE` and "
            f"resume from a checkpoint that is not newer"
        )
        super().__init__(f"{path} is damaged: {where}; {remedy}")


class JournalTooNew(JournalError, NotImplementedError):
    """The journal has a newer schema version than this Tidegate reads."""

    def __init__(self, *, path: Path, found: int, known: int) -> None:
        self.path = path
        self.found = found
        self.known = known
        super().__init__(
            f"{path} has schema version {found}, and this Tidegate knows versions up to {known}; "
            f"resume it with the Tidegate that wrote it, or a later one"
        )


class JournalFailed(JournalError, OSError):
    """The disk failed a read or write of the journal."""

    def __init__(self, *, path: Path, why: str) -> None:
        self.path = path
        self.why = why
        super().__init__(
            f"{path} can't be used: {why}. Everything reported as committed is in it; free disk "
            "space or repair the disk, then resume the run"
        )


class RecordingFailed(TidegateError, OSError):
    """A file of a run's recording cannot be written."""

    def __init__(self, *, path: Path, why: str) -> None:
        self.path = path
        self.why = why
        super().__init__(
            f"{path} can't be written: {why}. Earlier records are readable; free disk space or "
            "repair the disk, or omit run_directory to run without records"
        )


class JournalBehind(JournalError, TimeoutError):
    """The disk writes the journal more slowly than records are appended."""

    def __init__(self, *, path: Path, pending_bytes: int, why: str) -> None:
        self.path = path
        self.pending_bytes = pending_bytes
        super().__init__(
            f"{pending_bytes / 1e6:.1f} MB wait to be written to {path}: {why}; the disk hangs, or "
            f"is too slow for this run"
        )


class VirtualTimeUp(TidegateError, TimeoutError):
    """A simulated program did not end within its limit of virtual seconds."""

    def __init__(self, *, limit_s: float, waiting: list[str]) -> None:
        self.limit_s = limit_s
        self.waiting = waiting
        super().__init__(
            f"{limit_s:.0f} virtual seconds have passed without an end, and {len(waiting)} tasks "
            f"wait: {'; '.join(waiting)}"
        )


class AuditError(TidegateError, ValueError):
    """A run directory cannot be audited: files are missing or not in the expected format."""
