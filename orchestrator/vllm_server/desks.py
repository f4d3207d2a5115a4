"""Who does the server's work? All its parts, as its paths find them. It decides nothing."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tidegate.orchestrator.config import RunSettings
from tidegate.orchestrator.vllm_server.completing import Completer
from tidegate.orchestrator.vllm_server.control import ServerControl
from tidegate.orchestrator.vllm_server.desk import RequestDesk
from tidegate.orchestrator.vllm_server.metrics import ServerCounts
from tidegate.orchestrator.vllm_server.model_info import ModelInfo
from tidegate.orchestrator.vllm_server.weight_desk import WeightDesk

if TYPE_CHECKING:
    from tidegate.orchestrator.scheduler import Scheduler


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
    counts: ServerCounts = field(default_factory=ServerCounts)
