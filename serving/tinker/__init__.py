"""Server of the Tinker API: LoRA adapters trained and sampled over HTTP, by the SDK `tinker`.

`server.py` starts it over a run's engines; `app.py` has the routes.
"""
