"""vLLM's HTTP API, for trainers and clients written for vLLM."""
