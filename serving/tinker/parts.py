"""Parts of the Tinker server, as its handlers and requests of models get them."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tidegate.serving.http.errors import ApiError
from tidegate.serving.tinker.checkpoints import CheckpointStore
from tidegate.serving.tinker.futures import FutureTable
from tidegate.serving.tinker.journal import ServerState
from tidegate.serving.tinker.models import ModelTrainer, TrainedModel
from tidegate.serving.tinker.samplers import EngineAdapters
from tidegate.serving.tinker.sampling import OtherModel, SampleRunner
from tidegate.serving.tinker.sessions import SessionTable, TinkerSession
from tidegate.serving.tinker.tenants import TenantLimits, Tenants

if TYPE_CHECKING:
    from tidegate.orchestrator.fleet.fleet import Fleet


@dataclass(frozen=True, slots=True)
class TinkerParts:
    """Parts of the server, which the handlers call."""

    base_model: str
    """Name of the trained base model in requests and answers."""
    model_directory: Path
    fleet: "Fleet"
    tenants: Tenants
    sessions: SessionTable
    futures: FutureTable
    trainer: ModelTrainer
    adapters: EngineAdapters
    checkpoints: CheckpointStore
    runner: SampleRunner
    """Runner of samples of the trained base model and of its adapters."""
    other_runners: Mapping[str, OtherModel]
    """Base models that are sampled from only, by their names."""
    limits: TenantLimits
    state: "ServerState | None"
    """Where sessions and requests are kept; None if the server forgets them."""

    def check_base_model(self, name: str) -> None:
        """Raise ApiError if ``name`` is not the base model that this server trains."""
        if self._other_name(name) is not None:
            raise ApiError(
                400,
                f"base_model {name!r:.200} is sampled from only; this server trains adapters of "
                f"{self.base_model}",
            )
        self.sampled_model(name)

    def sampled_model(self, name: str) -> str | None:
        """Return which of ``other_runners`` a base model's name means; None for the trained one.

        Raises:
            ApiError: 400, it is not served here.
        """
        if name in (self.base_model, str(self.model_directory)):
            return None
        if (found := self._other_name(name)) is None:
            has = ", ".join([self.base_model, *self.other_runners])
            raise ApiError(
                400, f"base_model {name!r:.200} is not served here; this server has {has}"
            )
        return found

    def _other_name(self, name: str) -> str | None:
        runners = self.other_runners.items()
        return next((n for n, each in runners if name in (n, str(each.directory))), None)

    def session(self, session_id: str, tenant: str) -> TinkerSession:
        """Return a tenant's session, and record that its client is alive."""
        return self.sessions.get(session_id, tenant, asyncio.get_running_loop().time())

    def model(self, model_id: str, tenant: str) -> TrainedModel:
        """Return a tenant's model.

        Raises:
            ApiError: 404, the tenant has no such model.
        """
        model = self.trainer.models.get(model_id)
        if model is None or model.tenant != tenant:
            raise ApiError(404, f"there is no model {model_id!r:.200}; it ends with its session")
        return model
