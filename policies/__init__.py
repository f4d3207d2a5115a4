"""Pure decisions and formulas: no I/O, no clock, no asyncio."""
