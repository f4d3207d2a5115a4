"""Server of the Tinker API: LoRA adapters trained and sampled over HTTP, with the SDK `tinker`.

`tidegate tinker` and ``tidegate.tinker_server`` start it through `server.py`, over a run's engines;
`app.py` has the routes.
"""
