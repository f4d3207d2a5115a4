"""Operations of an HTTP server on a run's engines: pauses, sleep, new weights and adapters."""
