"""Pure decision rules and tensor formulas of RL training: no I/O, no clock, no asyncio."""
