"""Users' episodes: coroutines that use a model by tokens or by messages, and their runner."""
