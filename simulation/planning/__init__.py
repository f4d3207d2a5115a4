"""Forecast of a run's throughput and staleness, by closed forms or by simulation."""
