"""OpenTelemetry's trace context (W3C) as headers, to continue a trace in another process.

Calls to environments and tools and sessions of the gateway carry them. Without OpenTelemetry there
are none, and nothing is imported.
"""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


def trace_headers() -> dict[str, str]:
    """Return the headers of the current span; none if the process does not use OpenTelemetry."""
    headers: dict[str, str] = {}
    if (propagate := sys.modules.get("opentelemetry.propagate")) is not None:
        propagate.inject(headers)
    return headers


@contextmanager
def continued_trace(headers: Mapping[str, str]) -> Iterator[None]:
    """Run what is within under the span that ``headers`` name, and under none if they name none;
    do nothing without headers, or where OpenTelemetry is not installed."""
    if not headers:
        yield
        return
    try:
        from opentelemetry import context, propagate
    except ImportError:  # a worker process may run in a Python of its own
        yield
        return
    token = context.attach(propagate.extract(headers, context.Context()))
    try:
        yield
    finally:
        context.detach(token)
