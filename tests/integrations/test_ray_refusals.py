"""Refusal of placements that Ray could never satisfy; needs no Ray."""

from typing import Any

import pytest

import tidegate
from tidegate.errors import ConfigError

pytestmark = pytest.mark.wire


@pytest.mark.parametrize(
    ("resources", "why"),
    [
        ({"cpus": -1}, "cpus of RayResources must be .* got -1"),
        ({"gpus": 1.5}, "gpus of RayResources must be .* got 1.5"),
        ({"gpus": float("nan")}, "gpus of RayResources must be .* got nan"),
        ({"cpus": 0}, "need a CPU, a GPU or a placement group"),
    ],
)
def test_impossible_ray_resources_are_refused(resources: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        tidegate.RayResources(**resources)


def test_resources_may_be_a_fraction_of_a_gpu_or_zero_within_a_users_bundle() -> None:
    assert tidegate.RayResources(cpus=0, gpus=0.5).gpus == 0.5
    assert tidegate.RayResources(cpus=0, placement_group="mine").placement_group == "mine"


async def test_a_trainer_without_ranks_is_refused() -> None:
    rollouts: Any = None  # never used
    with pytest.raises(ConfigError, match="must be at least 1, got 0"):
        await tidegate.train_on_ray(rollouts, print, world_size=0)
