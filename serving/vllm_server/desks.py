"""The server's parts, as the handlers of its paths find them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tidegate.orchestrator.settings.config import RunSettings
from tidegate.serving.vllm_server.completing import Completer
from tidegate.serving.vllm_server.control import ServerControl
from tidegate.serving.vllm_server.desk import RequestDesk
from tidegate.serving.vllm_server.metrics import ServerCounts
from tidegate.serving.vllm_server.model_info import ModelInfo
from tidegate.serving.vllm_server.weight_desk import WeightDesk

if TYPE_CHECKING:
    from tidegate.orchestrator.scheduler.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class Desks:
    """The server's parts, of one run."""

    settings: RunSettings
    scheduler: "Scheduler"
    info: ModelInfo
    requests: RequestDesk
    completer: Completer
    control: ServerControl
    weights: WeightDesk
    weight_backend: str
    created_s: int
    instance_id: str
    longest_block_s: Callable[[], float]
    """Longest time for which the run's event loop could do nothing else."""
    counts: ServerCounts = field(default_factory=ServerCounts)
