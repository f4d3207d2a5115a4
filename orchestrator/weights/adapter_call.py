"""How does a LoRA adapter get to the engines, and away again? As a version like any other.

Its tensors are all that travels: the model's own are those of the version before.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tidegate.errors import WeightsRefused
from tidegate.orchestrator.run import Run
from tidegate.orchestrator.scheduler import Scheduler
from tidegate.orchestrator.weights.adapter_files import checked_name, load_adapter
from tidegate.orchestrator.weights.content import with_adapter, without_adapter
from tidegate.orchestrator.weights.parts import WeightParts
from tidegate.orchestrator.weights.publish_call import PublishCall
from tidegate.orchestrator.weights.publishing import PublishWait
from tidegate.transport.messages import Adapter

if TYPE_CHECKING:
    import torch


class AdapterCall(PublishCall):
    """An adapter on its way, new or with new tensors."""

    def __init__(
        self,
        run: Run,
        name: str,
        adapter: "Mapping[str, torch.Tensor] | str | Path",
        config: object,
        wait: PublishWait,
    ) -> None:
        """Read it.

        Raises:
            ConfigError: it is no LoRA adapter that engines could serve.
        """
        loaded = load_adapter(adapter, config)
        super().__init__(run, loaded.tensors, wait, partial=True)
        self._change = partial(with_adapter, Adapter(checked_name(name), loaded.scale))
        self.parts = WeightParts(is_adapter=True)


class UnloadCall(PublishCall):
    """An adapter that is to go."""

    def __init__(self, run: Run, name: str, wait: PublishWait) -> None:
        super().__init__(run, {}, wait, partial=True)
        self._name = name
        self._change = partial(without_adapter, name)

    async def run(self, scheduler: Scheduler) -> int:
        """Bring the version without it to the engines.

        Raises:
            WeightsRefused: there is no such adapter; else as :meth:`PublishCall.run`.
        """
        known = scheduler.control.weights.adapters_before
        if self._name not in known:
            raise WeightsRefused(
                f"no adapter {self._name!r} is published, there are {sorted(known) or 'none'}"
            )
        return await super().run(scheduler)
