"""Tenants of the Tinker server, and the API keys that they show.

A tenant owns sessions, models, samplers, results and checkpoints, and uses no others. Keys are
compared in constant time.
"""

import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field

from tidegate.errors import ConfigError
from tidegate.serving.http.errors import ApiError

ANYBODY = ""
"""Tenant of all requests where the server has no keys."""

KEY_PREFIX = "tml-"
"""Beginning of every key: the SDK refuses others."""


@dataclass(frozen=True, slots=True)
class Tenants:
    """API keys, each with the name of the tenant that shows it."""

    names: Mapping[str, str] = field(default_factory=dict)
    """Tenant by key; empty if the server needs no key."""

    def __post_init__(self) -> None:
        for key, name in self.names.items():
            if not key.startswith(KEY_PREFIX):
                raise ConfigError(
                    f"the API key of tenant {name!r} must begin with {KEY_PREFIX!r}, as the SDK "
                    f"wants"
                )

    def of(self, key: str) -> str:
        """Return the tenant that shows a key.

        Raises:
            ApiError: 401, no tenant has this key.
        """
        if not self.names:
            return ANYBODY
        found = self._find(key)
        if found is None:
            raise ApiError(
                401,
                "the API key is not known to this server; use one of those that it was started "
                "with",
            )
        return found

    def knows(self, key: str) -> bool:
        """Whether a key is a tenant's."""
        return self._find(key) is not None

    def _find(self, key: str) -> str | None:
        found = None
        for each, name in self.names.items():
            if hmac.compare_digest(each.encode(), key.encode()):
                found = name
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantLimits:
    """Limits of one tenant's work; beyond those of concurrent work the SDK waits and retries."""

    models: int = 16
    """Models in training, each with its adapter and optimizer in memory."""
    samples: int = 4096
    """Sampling requests that have not ended. The SDK itself sends up to 2,000 per sampler."""
    sequence_tokens: int = 32_768
    """Tokens of one sequence to train on: the only training thread works on it for all tenants."""

    def __post_init__(self) -> None:
        for name in ("models", "samples", "sequence_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(
                    f"a tenant's {name} must be at least 1, got {getattr(self, name)}"
                )

    def check_models(self, owned: int) -> None:
        """Raise ApiError 429 if a tenant that has ``owned`` models may have no other."""
        if owned >= self.models:
            raise ApiError(
                429,
                f"{owned} models are in training, and a tenant may have {self.models}: end a "
                f"session with ServiceClient.close(), wait a minute after a client was killed, or "
                f"start the server with --tenant-models",
            )

    def check_samples(self, running: int) -> None:
        """Raise ApiError 429 if a tenant with ``running`` samples may have no other."""
        if running >= self.samples:
            raise ApiError(
                429,
                f"{running} samples run, and a tenant may have {self.samples}: wait for some, or "
                "start the server with a larger --tenant-samples",
            )
