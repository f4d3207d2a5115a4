"""Throughput of messages and tokens, against zmq.asyncio.

``python -m benchmarks.transport [--json] [messages] [tokens]`` prints ``name, value,
unit, peer, ratio``, with the peer's name and the spread of ours. Figures per core use the CPU time
of the receiving process, its I/O threads included, because the machine may be busy otherwise.
"""

from benchmarks.table import make_parser, show
from benchmarks.transport import messages, tokens

SECTIONS = {"messages": messages.rows, "tokens": tokens.rows}


def main() -> None:
    """Measure, and print the table."""
    parser = make_parser(__doc__)
    parser.add_argument("sections", nargs="*", help=f"of {', '.join(SECTIONS)}; all by default")
    options = parser.parse_args()
    if unknown := [name for name in options.sections if name not in SECTIONS]:
        parser.error(f"there is no {', '.join(unknown)}; there are {', '.join(SECTIONS)}")
    for section in options.sections or SECTIONS:
        show(SECTIONS[section](), as_json=options.json)


if __name__ == "__main__":
    main()
