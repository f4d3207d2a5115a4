from tidegate.orchestrator.telemetry.statistics import EngineWork
from tidegate.orchestrator.telemetry.timekeeping import Timekeeper


def test_work_counts_from_the_first_mark_on_and_that_of_engines_which_came_since_whole() -> None:
    now_us = iter((0, 4_000_000, 10_000_000))
    keeper = Timekeeper(None, now_us=lambda: next(now_us))
    keeper.mark("wait", 0, {"a": EngineWork(5_000_000, 100), "gone": EngineWork(1_000_000, 50)})
    keeper.mark("wait", 0, {"a": EngineWork(6_000_000, 200)})
    keeper.mark("train", 0, {"a": EngineWork(9_000_000, 500), "new": EngineWork(6_000_000, 300)})
    usage = keeper.usage()
    assert (usage.wall_s, usage.tokens_per_s) == (10.0, 70.0)
    assert usage.engine_idle_share == 0.5
    assert usage.trainer_idle_share == 0.4
