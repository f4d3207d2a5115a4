"""The run's engines behind vLLM's HTTP API: clients and trainers that know vLLM drive Tidegate."""
