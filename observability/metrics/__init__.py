"""State of a running run: collected in memory, seen at one instant, exported to Prometheus."""
