"""Users' episodes: coroutines that talk to a model, in tokens or in messages."""
