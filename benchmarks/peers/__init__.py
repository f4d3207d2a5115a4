"""Peer rollout loops (AReaL, SkyRL) and the Tinker SDK's client, each run in its own Python; see
``README.md`` here."""
