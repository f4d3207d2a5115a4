"""Messages between the ``relay`` channel's sender, the hosts' relays and their engines."""

from typing import Annotated

import msgspec

from tidegate.transport.limits import Count

PARENT_TIMEOUT_S = 3.0
"""A parent silent for this long counts as dead."""

KEEP_ALIVE_INTERVAL_S = 1.0
"""Interval of keep-alive messages from a relay that is itself waiting."""

STALL_TIMEOUT_S = 30.0
"""Timeout without a single chunk, from any parent."""

Text = Annotated[str, msgspec.Meta(max_length=256)]


class ParentRequest(msgspec.Struct, frozen=True, array_like=True, tag="parent_request"):
    """Relay -> sender: asks which node to fetch ``location`` from."""

    location: Text
    relay_address: Text
    """Address at which this relay serves other relays."""
    silent_parent: Text = ""
    """Address of the parent assigned before, if it is silent."""


class ParentAssignment(msgspec.Struct, frozen=True, array_like=True, tag="parent_assignment"):
    """Sender -> relay: assigns the node to fetch from."""

    location: str
    address: str = ""
    """Address of the parent; empty: the sender itself."""
    nbytes: Count = 0
    """Total size of the location, in bytes."""
    kept_locations: list[str] = []
    """Locations that may still be requested; the relay may drop all others."""
    refusal: str = ""


class LocationRequest(msgspec.Struct, frozen=True, array_like=True, tag="location_request"):
    """Engine -> its host's relay: asks for ``location`` and for progress reports."""

    location: Text


class LocationProgress(msgspec.Struct, frozen=True, array_like=True, tag="location_progress"):
    """Relay -> engine: number of leading bytes available. The first one carries the memory's
    descriptor."""

    location: str
    ready_bytes: Count = 0
    refusal: str = ""
