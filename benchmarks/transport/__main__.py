"""Throughput of messages and tokens, against zmq.asyncio.

``python -m benchmarks.transport [--json] [messages] [tokens]`` prints ``name, value,
unit, peer, ratio``, with the peer's name and the spread of ours. Figures per core use the CPU time
of the receiving process, its I/O threads included, because the machine may be busy otherwise.
"""

import argparse

from benchmarks.table import show
from benchmarks.transport import messages, tokens

SECTIONS = {"messages": messages.rows, "tokens": tokens.rows}


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    parser.add_argument("sections", nargs="*", help=f"of {', '.join(SECTIONS)}; all by default")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.sections if name not in SECTIONS]:
        parser.error(f"there is no {', '.join(unknown)}; there are {', '.join(SECTIONS)}")
    for section in arguments.sections or SECTIONS:
        show(SECTIONS[section](), as_json=arguments.json)


if __name__ == "__main__":
    main()
