"""Every error Tidegate raises on purpose.

TidegateError
├── ConfigError             settings that can't work                    (also ValueError)
├── ModelError              a model directory that can't be loaded      (also ValueError)
├── BadFrame                a peer sent bytes we cannot read            (also ValueError)
├── WeightsRefused          published weights that don't fit the model  (also ValueError)
├── AddressInUse            the orchestrator's address is taken         (also OSError)
├── TurnRefused             an engine can never serve this turn         (also ValueError)
├── OutOfBlocks             a turn can never fit the KV cache           (also MemoryError)
├── EngineLost              an engine stopped answering                 (also ConnectionError)
├── EngineStartFailed       an engine process ended before it was ready (also RuntimeError)
├── EngineLagging           an engine did not take up new weights       (also TimeoutError)
├── PublishNeeded           a batch was asked for that can't fill yet    (also RuntimeError)
├── EpisodeError            a user's episode fails every time           (also RuntimeError)
├── RunClosed               the run has ended; nothing more can be asked of it (also RuntimeError)
├── NothingLeftToHappen     a simulated program waits for ever          (also RuntimeError)
└── AuditError              a run directory that can't be audited       (also ValueError)

Each says what was wrong, with its value, and what to do about it.
"""


class TidegateError(Exception):
    """Base class: catch it to separate our failures from anyone else's."""


class ConfigError(TidegateError, ValueError):
    """Settings that contradict each other or can never work."""


class ModelError(TidegateError, ValueError):
    """A model directory that is missing, damaged, or of an architecture we don't run."""


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


class TurnRefused(TidegateError, ValueError):
    """An engine can never serve this turn as asked."""


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


class EngineLost(TidegateError, ConnectionError):
    """An engine stopped answering, and no other is left to take its turns."""


class EngineStartFailed(TidegateError, RuntimeError):
    """An engine process ended, or was too slow, before it was ready to serve."""

    def __init__(self, *, engine: str, why: str) -> None:
        self.engine = engine
        self.why = why
        super().__init__(f"engine {engine!r} did not start: {why}")


class EngineLagging(TidegateError, TimeoutError):
    """An engine still serves old weights after the time allowed for an update."""

    def __init__(self, *, engines: list[str], wanted_version: int, waited_s: float) -> None:
        self.engines = engines
        self.wanted_version = wanted_version
        self.waited_s = waited_s
        super().__init__(
            f"{', '.join(engines)} still without weights v{wanted_version}, {waited_s:.0f} s after "
            f"it was published; check the engine's log, or raise weights_timeout_s if loading "
            f"this model really takes longer"
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


class EpisodeError(TidegateError, RuntimeError):
    """The user's episode failed many times in a row without one success."""


class RunClosed(TidegateError, RuntimeError):
    """The run has ended; nothing more can be asked of it."""


class NothingLeftToHappen(TidegateError, RuntimeError):
    """In virtual time everybody waits, and nothing is scheduled that could wake anyone."""

    def __init__(self, *, waiting: list[str]) -> None:
        self.waiting = waiting
        super().__init__(
            f"nothing is scheduled any more, and {len(waiting)} tasks wait for ever: "
            f"{'; '.join(waiting)}"
        )


class AuditError(TidegateError, ValueError):
    """A run directory that can't be audited: files missing, or not of this format."""
