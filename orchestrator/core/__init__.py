"""Sans-IO core of a run: groups, rollouts, turns, weight versions and the token ledger.

The scheduler (``orchestrator/scheduler``) and the simulation feed the core events and carry out its
commands.
"""
