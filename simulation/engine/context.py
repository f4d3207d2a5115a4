"""State shared by all engines of a simulation: the wire, the weights, the model, the records.

:mod:`simulation`, :mod:`run` and :mod:`crash_restart` make it, and pass it to every simulated
engine, host, episode and trainer. Holds the objects of :mod:`wire`, :mod:`staging`, :mod:`model`
and :mod:`ground_truth`.
"""

import asyncio
from dataclasses import dataclass, field

from tidegate.simulation.checks.coverage import CoverageMarks
from tidegate.simulation.checks.ground_truth import GroundTruth
from tidegate.simulation.checks.model import HashModel, TurnModel
from tidegate.simulation.engine.staging import WeightBuffer
from tidegate.simulation.engine.wire import FrameLog, SimulatedRouter


@dataclass(slots=True)
class SimulationContext:
    """State of one simulation that outlives its engine and orchestrator processes."""

    loop: asyncio.AbstractEventLoop
    frame_log: FrameLog
    ground_truth: GroundTruth = field(default_factory=GroundTruth)
    coverage: CoverageMarks = field(default_factory=CoverageMarks)
    buffer: WeightBuffer = field(default_factory=WeightBuffer)
    model: TurnModel = field(default_factory=HashModel)
    router: SimulatedRouter = field(init=False)

    def __post_init__(self) -> None:
        self.router = SimulatedRouter(self.loop, self.frame_log, self.coverage)
