"""`tidegate plan`: forecasts a run's throughput and staleness."""
