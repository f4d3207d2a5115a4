"""Users' episodes: coroutines that sample from a model, with tokens or messages, and their runner.

The scheduler runs them on the run's event loop; the gateway, the servers and the integrations use
the same :class:`Episode`. Tokenizer and chat template come from the model directory.
"""
