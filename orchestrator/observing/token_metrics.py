"""Which figures tell where a run's tokens, rollouts and groups are?

Knows nothing of their age, nor of time.
"""

from tidegate.orchestrator.observing.metric import Metric, by_key, last_batch, of_run

TOKENS = (
    Metric(
        "tidegate_tokens_generated_total",
        "counter",
        "Tokens sampled for training; equals trained + buffered + in flight + discarded.",
        of_run(lambda s: s.ledger.generated),
    ),
    Metric(
        "tidegate_tokens_trained_total",
        "counter",
        "Tokens handed to the trainer, less what it says it left out.",
        of_run(lambda s: s.ledger.trained),
    ),
    Metric(
        "tidegate_tokens_discarded_total",
        "counter",
        "Tokens that will never be trained.",
        by_key(lambda seen: dict(seen.statistics.ledger.discarded)),
        ("reason",),
    ),
    Metric(
        "tidegate_tokens_buffered",
        "gauge",
        "Tokens of finished rollouts that the trainer has not had.",
        of_run(lambda s: s.ledger.buffered),
    ),
    Metric(
        "tidegate_tokens_in_flight",
        "gauge",
        "Tokens of rollouts whose episode is going on.",
        of_run(lambda s: s.ledger.in_flight),
    ),
    Metric(
        "tidegate_tokens_unaccounted",
        "gauge",
        "Generated less all accounts of the ledger: 0, or a bug.",
        of_run(lambda s: s.ledger.error),
    ),
    Metric(
        "tidegate_tokens_evaluation_total",
        "counter",
        "Tokens sampled for evaluation only.",
        of_run(lambda s: s.evaluation_ledger.generated),
    ),
    Metric(
        "tidegate_tokens_prefilled_total",
        "counter",
        "Context tokens that turns started from, or that were computed again.",
        of_run(lambda s: s.prefilled_tokens),
    ),
    Metric(
        "tidegate_tokens_cached_total",
        "counter",
        "Of those prefilled, tokens whose KV engines had already.",
        of_run(lambda s: s.cached_tokens),
    ),
    Metric(
        "tidegate_tokens_per_second",
        "gauge",
        "Tokens sampled per second, since the first batch was asked for.",
        of_run(lambda s: s.tokens_per_s),
    ),
)

ROLLOUTS = (
    Metric(
        "tidegate_batches_total",
        "counter",
        "Batches handed to the trainer.",
        of_run(lambda s: s.batches),
    ),
    Metric(
        "tidegate_batches_untold_total",
        "counter",
        "Batches at whose figures on_batch raised.",
        of_run(lambda s: s.batches_untold),
    ),
    Metric(
        "tidegate_rollouts_trained_total",
        "counter",
        "Rollouts handed to the trainer, less those it says it left out.",
        of_run(lambda s: s.trained_rollouts),
    ),
    Metric(
        "tidegate_rollouts_mixed_version_total",
        "counter",
        "Trained rollouts whose tokens came from two or more versions.",
        of_run(lambda s: s.mixed_version_rollouts),
    ),
    Metric(
        "tidegate_rollouts_discarded_total",
        "counter",
        "Rollouts that will never be trained.",
        by_key(lambda seen: dict(seen.statistics.discarded_rollouts)),
        ("reason",),
    ),
    Metric(
        "tidegate_groups_running",
        "gauge",
        "Groups with an episode going on.",
        of_run(lambda s: s.running_groups),
    ),
    Metric(
        "tidegate_groups_buffered",
        "gauge",
        "Groups that have ended and wait for the trainer.",
        of_run(lambda s: s.buffered_groups),
    ),
    Metric(
        "tidegate_groups_training",
        "gauge",
        "Groups handed over, and not yet in a version that is live.",
        of_run(lambda s: s.training_groups),
    ),
    Metric(
        "tidegate_groups_capacity",
        "gauge",
        "Groups that may still be admitted now.",
        of_run(lambda s: s.capacity_groups),
    ),
    Metric(
        "tidegate_reward_mean",
        "gauge",
        "Mean reward of the last batch.",
        last_batch("reward"),
    ),
    Metric(
        "tidegate_length_bias_ratio",
        "gauge",
        "Mean length trained over mean length generated, lately; below 1 short ones were favoured.",
        of_run(lambda s: None if s.length_bias is None else s.length_bias.ratio),
    ),
)
