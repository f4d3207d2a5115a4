"""How old may a sample be? Policies that bound staleness, and the bound each really guarantees.

They know counts and versions only: not what a group is made of, nor where it runs.

Symbols: η ``max_staleness``, B ``groups_per_batch``, v the trainer's version.
"""

from dataclasses import dataclass, field

from tidegate.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundedStaleness:
    """No sample older than η versions is trained on, and hardly any is dropped to keep it so.

    Two rules make the bound hard:

    * **Admission** counts what is outstanding: groups running, buffered, or in training until the
      version made from them is live on every engine. That never exceeds ``(η + 1)·B``.
    * **Consumption** is in the order of admission.

    Why it holds: group n (counting those not dropped) is trained in batch ``n // B``, that is at
    version ``n // B``. It was admitted when fewer than ``(η + 1)·B`` groups were outstanding, so
    at least ``n + 1 - (η + 1)·B`` groups had been released by a live version: that version was at
    least ``n // B - η``, and no token of the group is older. A dropped group gives its place back
    and moves later ones forward, which only makes them fresher. A trainer that publishes without
    having had a batch in between ages what waits; then :meth:`is_fresh`, asked of every group
    before it is handed over, drops what has become too old, and its task is taken again.

    η = 0 is synchronous training; η = 1 trains on batch k while batch k + 1 is generated. Peers
    count ``accepted + running <= (η + v + 1)·B`` (AReaL, arXiv:2505.24298), which drifts when a
    filter rejects, and consume in the order of completion, which lets samples grow about twice as
    old.
    """

    max_staleness: int
    """η, in weight versions."""
    groups_per_batch: int
    """B."""
    outstanding_groups_limit: int | None = None
    """Fewer groups at once than η allows, where environments or memory ask for it."""
    _outstanding_groups_max: int = field(init=False, repr=False)
    """Worked out once: it is asked for after every event."""

    def __post_init__(self) -> None:
        if self.max_staleness < 0:
            raise ConfigError(
                f"max_staleness counts weight versions and must be >= 0 (0 is synchronous), "
                f"got {self.max_staleness}"
            )
        if self.groups_per_batch < 1:
            raise ConfigError(f"groups_per_batch must be >= 1, got {self.groups_per_batch}")
        limit = self.outstanding_groups_limit
        if limit is not None and limit < self.groups_per_batch:
            raise ConfigError(
                f"a batch of {self.groups_per_batch} groups can never fill when only {limit} may "
                f"be outstanding; raise outstanding_groups_limit to at least groups_per_batch "
                f"({self.groups_per_batch}), or make batches smaller"
            )
        allowed = (self.max_staleness + 1) * self.groups_per_batch
        object.__setattr__(self, "_outstanding_groups_max", min(allowed, limit or allowed))

    @property
    def guaranteed_bound(self) -> int:
        """The staleness that no trained sample exceeds."""
        return self.max_staleness

    @property
    def outstanding_groups_max(self) -> int:
        """Groups that may be running, buffered or in training at once: (η + 1)·B, or the limit."""
        return self._outstanding_groups_max

    def capacity_groups(self, *, outstanding_groups: int) -> int:
        """How many more groups may be admitted now."""
        return max(0, self.outstanding_groups_max - outstanding_groups)

    def can_fill_batch(self, *, unpublished_groups: int) -> bool:
        """Whether a batch can still fill while ``unpublished_groups`` wait for a publish.

        Groups handed to the trainer hold their places until then; once fewer than B places are
        left, asking for another batch would wait for ever.
        """
        return self.outstanding_groups_max - unpublished_groups >= self.groups_per_batch

    def is_fresh(self, *, oldest_version: int, trainer_version: int) -> bool:
        """Whether a sample may be trained on now; the second gate, queue time included."""
        return trainer_version - oldest_version <= self.max_staleness
