"""vLLM-compatible HTTP server over a run's engines."""
