"""Peer rollout loops (AReaL, SkyRL), each run in its own Python; see ``README.md`` here."""
