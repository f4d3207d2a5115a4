"""What others' rollout loops cost, each run in a Python of its own. See ``README.md`` here."""
