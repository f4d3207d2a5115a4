"""State that all engines of a simulation share: the wire, the weights, the model, the records."""

import asyncio
from dataclasses import dataclass, field

from tidegate.simulation.hardships import Hardships
from tidegate.simulation.model import HashModel, TurnModel
from tidegate.simulation.staging import WeightBuffer
from tidegate.simulation.truth import Truth
from tidegate.simulation.wire import SimulatedRouter, Tape


@dataclass(slots=True)
class World:
    """Shared state; it outlives engines and orchestrators, which come and go in it."""

    loop: asyncio.AbstractEventLoop
    tape: Tape
    truth: Truth = field(default_factory=Truth)
    hardships: Hardships = field(default_factory=Hardships)
    buffer: WeightBuffer = field(default_factory=WeightBuffer)
    model: TurnModel = field(default_factory=HashModel)
    router: SimulatedRouter = field(init=False)

    def __post_init__(self) -> None:
        self.router = SimulatedRouter(self.loop, self.tape, self.hardships)
