"""Messages that load, update and unload LoRA adapters with weight versions of their own.

Part of the protocol in :mod:`tidegate.transport.messages`; only for engines whose hello has
``adapters_max``. One adapter is staged, swapped and tagged independently of the model's weights and
of all other adapters. The reasons are in docs/decisions/adapter-versions.md.
"""

from typing import Annotated

import msgspec

from tidegate.transport.limits import Count
from tidegate.transport.message import KvPolicy, Message, PauseMode
from tidegate.transport.weight_messages import UpdateWeights

AdapterName = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
"""Name of an adapter, unique in its run."""

AdapterVersion = Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
"""Number of an adapter's version: each adapter counts its own publishes, from 1."""

LIVE_ADAPTER = 0
"""Value of ``SamplingParams.adapter_version`` for the version that is live when the turn starts,
and that later swaps replace."""

# ---------------------------------------------------------------- orchestrator -> engine


class LoadAdapter(Message, frozen=True, kw_only=True, tag="load_adapter"):
    """Loads one version of an adapter beside all versions that are served. Answered by
    ``AdapterLoaded`` or ``AdapterFailed``. It serves pinned turns at once, and others from
    ``SwapAdapter`` on."""

    name: AdapterName
    """Name of the adapter."""
    version: AdapterVersion
    """Number among the adapter's own versions."""
    scale: float
    """Factor of the product of the adapter's matrices."""
    chunks: list[UpdateWeights]
    """Location of the tensors in the weight channel; ``version`` and ``adapter`` of a chunk have no
    meaning here."""
    is_live: bool = False
    """Whether this is the adapter's live version, sent again because the engine asked for it. Takes
    effect unless a later version is live."""
    is_staged: bool = False
    """Whether ``SwapAdapter`` follows; the version stays in memory until then."""


class SwapAdapter(Message, frozen=True, kw_only=True, tag="swap_adapter"):
    """Makes a loaded version the adapter's live one between two steps. Answered by ``AdapterLive``.

    Applies to the turns of this adapter only: ``abort`` ends the running ones, ``keep`` continues
    them under the new version, ``wait`` lets them end under the old version while new turns use the
    new one. Pinned turns keep their version.
    """

    name: AdapterName
    """Name of the adapter."""
    version: AdapterVersion
    """Number among the adapter's own versions."""
    pause_mode: PauseMode
    """What happens to the adapter's running turns."""
    kv_policy: KvPolicy
    """What happens to the KV of its turns that continue."""


class UnloadAdapter(Message, frozen=True, kw_only=True, tag="unload_adapter"):
    """Drops an adapter, or one version of it, and refuses the turns that use it; unknown ones are
    ignored. Also the answer to ``AdapterNeeded`` for a version that does not exist (any more)."""

    name: AdapterName
    """Name of the adapter."""
    version: AdapterVersion | None = None
    """Version to drop; None for all versions."""


# ---------------------------------------------------------------- engine -> orchestrator


class AdapterLoaded(Message, frozen=True, kw_only=True, tag="adapter_loaded"):
    """A version of an adapter is in memory and fits the model."""

    name: AdapterName
    """Name of the adapter."""
    version: AdapterVersion
    """Number among the adapter's own versions."""
    staging_us: Count = 0
    """Time from the request until it was loaded, in microseconds."""


class AdapterFailed(Message, frozen=True, kw_only=True, tag="adapter_failed"):
    """A version of an adapter was refused, for this reason; nothing else has changed."""

    name: AdapterName
    """Name of the adapter."""
    version: AdapterVersion
    """Number among the adapter's own versions."""
    message: str
    """Reason of the refusal."""


class AdapterLive(Message, frozen=True, kw_only=True, tag="adapter_live"):
    """From now on turns that follow the adapter's live version are sampled by this one."""

    name: AdapterName
    """Name of the adapter."""
    version: AdapterVersion
    """Number among the adapter's own versions."""
    swapped_us: Count = 0
    """Time of the swap on the engine's monotonic clock, in microseconds."""
    recomputed_turns: Count = 0
    """Number of running turns whose KV is computed again."""


class AdapterNeeded(Message, frozen=True, kw_only=True, tag="adapter_needed"):
    """Turns wait for an adapter that the engine does not hold. Answered by ``LoadAdapter`` once
    there is such a version, or by ``UnloadAdapter``."""

    name: AdapterName
    """Name of the adapter."""
    version: Count = LIVE_ADAPTER
    """Version of pinned turns; ``LIVE_ADAPTER`` for the live one."""


class HeldAdapter(msgspec.Struct, frozen=True, array_like=True):
    """Live version of one adapter on an engine, for its hello."""

    name: AdapterName
    """Name of the adapter."""
    version: AdapterVersion
    """Number among the adapter's own versions."""
