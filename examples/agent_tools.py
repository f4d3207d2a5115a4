"""The agent demo's tool, a calculator, which environment worker processes import and run.

``tool_demonstrations`` calls it too. It imports only the standard library, so a worker is small and
starts at once.
"""

import re

_SUM = re.compile(r"(-?[0-9]{1,4})([+-])([0-9]{1,4})")


def calculate(expression: str) -> str:
    """Add or subtract two whole numbers: 3+9."""
    match = _SUM.fullmatch(expression)
    if match is None:
        raise ValueError("not a sum of two numbers")
    left, operator, right = int(match[1]), match[2], int(match[3])
    return str(left + right if operator == "+" else left - right)
