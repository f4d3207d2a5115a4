"""Decision rules (staleness, routing, filters) and tensor formulas of RL training.

The orchestrator's core calls the rules, trainers the formulas. Pure: no I/O, no clock, no asyncio.
Formulas use torch, rules the standard library.
"""
