"""Which figures tell what trainer and engines spend a run's time on?

Knows nothing of what comes of it.
"""

from tidegate.orchestrator.observing.metric import Metric, by_key, forecast, of_engines, of_run
from tidegate.orchestrator.observing.observation import Observation


def _stuck(seen: Observation) -> dict[str, float]:
    counts: dict[str, float] = {}
    for each in seen.statistics.stuck:
        counts[each.what] = counts.get(each.what, 0) + 1
    return counts


TIMES = (
    Metric(
        "tidegate_trainer_version",
        "gauge",
        "The newest weight version published.",
        of_run(lambda s: s.trainer_version),
    ),
    Metric(
        "tidegate_live_version",
        "gauge",
        "The oldest weights that a living engine serves.",
        of_run(lambda s: s.live_version),
    ),
    Metric(
        "tidegate_run_seconds",
        "gauge",
        "Since the first batch was asked for, up to the trainer's last activity.",
        of_run(lambda s: s.wall_s),
    ),
    Metric(
        "tidegate_trainer_seconds_total",
        "counter",
        "Time the trainer spent: train, wait (for a batch), publish.",
        by_key(lambda seen: seen.noted.trainer_s),
        ("activity",),
    ),
    Metric(
        "tidegate_publishes_total",
        "counter",
        "Publishes in that time.",
        of_run(lambda s: s.publishes),
    ),
    Metric(
        "tidegate_episode_seconds_total",
        "counter",
        "Time of all episodes, added up, spent in what has a name: environment, score, tools, "
        "what episode.doing() named.",
        by_key(lambda seen: seen.statistics.episode_s),
        ("doing",),
    ),
    Metric(
        "tidegate_group_wait_seconds_total",
        "counter",
        "Time from the end of a group's first rollout to that of its last, of trained groups.",
        of_run(lambda s: s.group_wait_s),
    ),
    Metric(
        "tidegate_groups_waited_total",
        "counter",
        "Groups in that time.",
        of_run(lambda s: s.waited_groups),
    ),
    Metric(
        "tidegate_trainer_idle_ratio",
        "gauge",
        "Share of the run that the trainer waited for batches.",
        of_run(lambda s: s.trainer_idle_share),
    ),
    Metric(
        "tidegate_engine_idle_ratio",
        "gauge",
        "Share of the run that an engine was in no step, the mean over engines.",
        of_run(lambda s: s.engine_idle_share),
    ),
    Metric(
        "tidegate_rho_ratio",
        "gauge",
        "Throughput of the rollout over that of the trainer; above 1 the trainer limits.",
        of_run(forecast("rho")),
    ),
    Metric(
        "tidegate_batch_seconds",
        "gauge",
        "From one batch to the next, on the mean.",
        of_run(forecast("batch_s")),
    ),
    Metric(
        "tidegate_batch_attainable_seconds",
        "gauge",
        "The same if nobody waited who needn't.",
        of_run(forecast("attainable_batch_s")),
    ),
    Metric(
        "tidegate_paused",
        "gauge",
        "1 while engines are paused.",
        of_run(lambda s: float(s.pause_mode is not None)),
    ),
    Metric(
        "tidegate_stuck",
        "gauge",
        "Things that have not got on for stuck_after_s or longer.",
        by_key(_stuck),
        ("what",),
    ),
)

ENGINES = (
    Metric(
        "tidegate_engine_weight_version",
        "gauge",
        "The version that it serves.",
        of_engines(lambda e: e.weight_version),
        ("engine",),
    ),
    Metric(
        "tidegate_engine_running_turns",
        "gauge",
        "Turns it decodes.",
        of_engines(lambda e: e.running_turns),
        ("engine",),
    ),
    Metric(
        "tidegate_engine_waiting_turns",
        "gauge",
        "Turns in its queue.",
        of_engines(lambda e: e.waiting_turns),
        ("engine",),
    ),
    Metric(
        "tidegate_engine_slots",
        "gauge",
        "Turns it can decode at once.",
        of_engines(lambda e: e.max_running_turns),
        ("engine",),
    ),
    Metric(
        "tidegate_engine_tokens_total",
        "counter",
        "Tokens received from it.",
        of_engines(lambda e: e.tokens),
        ("engine",),
    ),
    Metric(
        "tidegate_engine_steps_total",
        "counter",
        "Its steps.",
        of_engines(lambda e: e.steps),
        ("engine",),
    ),
    Metric(
        "tidegate_engine_busy_seconds_total",
        "counter",
        "Time it spent in steps.",
        of_engines(lambda e: e.busy_s),
        ("engine",),
    ),
    Metric(
        "tidegate_engine_swaps_total",
        "counter",
        "Swaps of its weights.",
        of_engines(lambda e: e.swaps),
        ("engine",),
    ),
    Metric(
        "tidegate_engine_standstill_seconds_total",
        "counter",
        "Time in which no turn of it got on, for a swap of weights.",
        of_engines(lambda e: e.standstill_s),
        ("engine",),
    ),
    Metric(
        "tidegate_engine_out_of_memory_steps_total",
        "counter",
        "Steps for which it had no memory, and that it tried again with less.",
        of_engines(lambda e: e.out_of_memory_steps),
        ("engine",),
    ),
    Metric(
        "tidegate_engine_drafted_tokens_total",
        "counter",
        "Tokens it guessed and verified.",
        of_engines(lambda e: e.drafted_tokens),
        ("engine",),
    ),
    Metric(
        "tidegate_engine_accepted_tokens_total",
        "counter",
        "Of its guesses, those that were sampled.",
        of_engines(lambda e: e.accepted_tokens),
        ("engine",),
    ),
)
