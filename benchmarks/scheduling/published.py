"""Figures of the published model that the scheduling workloads come from.

The model is an event-driven
one of the same machines, with exact processor sharing in its engines and no overhead between
engines and trainer. It consumes groups in completion order unless a row's policy says otherwise.
Figures have two digits, so ratios are good to about a percent.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Published:
    """The model's figures for one policy on one workload; None if not published."""

    efficiency: float
    speedup_over_sync: float | None = None
    max_staleness: float | None = None
    mean_staleness: float | None = None
    mixed_share: float | None = None
    wasted_share: float | None = None
    masked_share: float | None = None
    length_bias: float | None = None


def published(workload: str, policy: str, eta: int, mode: str) -> Published | None:
    """Return the model's figures for a row, if published."""
    orders = _ORDERS if (workload, mode) == ("reasoning-32k", "keep") else {}
    by_mode = _TABLES[workload]
    return (
        orders.get((policy, eta))
        or by_mode.get((policy, eta, mode))
        or by_mode.get((policy, eta, ""))
    )


_TABLES: dict[str, dict[tuple[str, int, str], Published]] = {
    "math-8k": {
        ("sync-colocated", 0, ""): Published(0.39, 1.0, 0, 0.0, 0.0, 0.0),
        ("sync", 0, ""): Published(0.29, 0.74, 0, 0.0, 0.0, 0.0),
        ("one-step", 1, ""): Published(0.4, 1.01, 1, 1.0, 0.0, 0.0),
        ("april", 0, ""): Published(0.74, 1.89, 3, 1.0, 0.25, 0.0),
        ("completion", 1, "keep"): Published(0.58, 1.48, 2, 1.0, 0.03, 0.0),
        ("completion", 2, "keep"): Published(0.86, 2.17, 4, 2.0, 0.42, 0.0),
        ("completion", 4, "keep"): Published(0.89, 2.25, 5, 2.35, 0.65, 0.0),
        ("completion", 8, "keep"): Published(0.89, 2.25, 5, 2.35, 0.65, 0.0),
        ("completion", 1, "abort"): Published(0.58, 1.47, 2, 1.0, 0.03, 0.0),
        ("completion", 2, "abort"): Published(0.79, 2.0, 4, 2.0, 0.42, 0.0),
        ("completion", 4, "abort"): Published(0.8, 2.02, 5, 2.34, 0.64, 0.0),
        ("completion", 8, "abort"): Published(0.8, 2.02, 5, 2.34, 0.64, 0.0),
        ("completion", 1, "wait"): Published(0.4, 1.01, 1, 1.0, 0.0, 0.0),
        ("completion", 4, "wait"): Published(0.4, 1.01, 4, 4.0, 0.0, 0.0),
    },
    "reasoning-32k": {
        ("sync-colocated", 0, ""): Published(0.25, 1.0, 0, 0.0, 0.0, 0.0),
        ("sync", 0, ""): Published(0.21, 0.82, 0, 0.0, 0.0, 0.0),
        ("one-step", 1, ""): Published(0.25, 1.01, 1, 1.0, 0.0, 0.0),
        ("april", 0, ""): Published(0.67, 2.67, 4, 1.0, 0.14, 0.0),
        ("completion", 1, "keep"): Published(0.54, 2.14, 3, 1.0, 0.05, 0.0),
        ("completion", 2, "keep"): Published(0.8, 3.19, 5, 2.01, 0.19, 0.0),
        ("completion", 4, "keep"): Published(0.94, 3.72, 8, 3.02, 0.53, 0.0),
        ("completion", 8, "keep"): Published(0.94, 3.72, 8, 3.02, 0.53, 0.0),
        ("completion", 1, "abort"): Published(0.53, 2.09, 3, 1.0, 0.05, 0.0),
        ("completion", 2, "abort"): Published(0.74, 2.95, 6, 2.01, 0.2, 0.0),
        ("completion", 4, "abort"): Published(0.81, 3.22, 8, 3.0, 0.53, 0.0),
        ("completion", 8, "abort"): Published(0.81, 3.22, 8, 3.0, 0.53, 0.0),
        ("completion", 1, "wait"): Published(0.26, 1.02, 1, 1.0, 0.0, 0.0),
        ("completion", 4, "wait"): Published(0.25, 1.01, 4, 4.0, 0.0, 0.0),
    },
    "large-batch": {
        ("sync-colocated", 0, ""): Published(0.59, 1.0, 0, 0.0, 0.0, 0.0),
        ("sync", 0, ""): Published(0.38, 0.64, 0, 0.0, 0.0, 0.0),
        ("one-step", 1, ""): Published(0.59, 0.99, 1, 1.0, 0.0, 0.0),
        ("april", 0, ""): Published(0.94, 1.58, 3, 0.69, 0.24, 0.0),
        ("completion", 1, "keep"): Published(0.82, 1.38, 2, 1.0, 0.02, 0.0),
        ("completion", 2, "keep"): Published(0.94, 1.59, 3, 1.41, 0.18, 0.0),
        ("completion", 4, "keep"): Published(0.94, 1.59, 3, 1.41, 0.18, 0.0),
        ("completion", 1, "abort"): Published(0.8, 1.36, 2, 1.0, 0.02, 0.0),
        ("completion", 2, "abort"): Published(0.91, 1.54, 3, 1.41, 0.18, 0.0),
        ("completion", 4, "abort"): Published(0.91, 1.54, 3, 1.41, 0.18, 0.0),
        ("completion", 1, "wait"): Published(0.58, 0.98, 1, 1.0, 0.0, 0.0),
        ("completion", 4, "wait"): Published(0.55, 0.93, 4, 2.38, 0.0, 0.0),
    },
    "reasoning-64k": {
        ("sync-colocated", 0, ""): Published(0.24, 1.0, 0, 0.0, 0.0, 0.0),
        ("sync", 0, ""): Published(0.2, 0.83, 0, 0.0, 0.0, 0.0),
        ("one-step", 1, ""): Published(0.25, 1.01, 1, 1.0, 0.0, 0.0),
        ("april", 0, ""): Published(0.64, 2.65, 4, 1.0, 0.12, 0.0),
        ("completion", 1, "keep"): Published(0.52, 2.16, 3, 0.99, 0.06, 0.0),
        ("completion", 2, "keep"): Published(0.77, 3.18, 5, 2.01, 0.16, 0.0),
        ("completion", 4, "keep"): Published(0.95, 3.93, 8, 3.29, 0.49, 0.0),
        ("completion", 8, "keep"): Published(0.95, 3.93, 8, 3.29, 0.49, 0.0),
        ("completion", 1, "abort"): Published(0.51, 2.11, 3, 1.0, 0.06, 0.0),
        ("completion", 2, "abort"): Published(0.71, 2.91, 5, 2.01, 0.16, 0.0),
        ("completion", 4, "abort"): Published(0.82, 3.37, 8, 3.26, 0.49, 0.0),
        ("completion", 8, "abort"): Published(0.82, 3.37, 8, 3.26, 0.49, 0.0),
        ("completion", 1, "wait"): Published(0.25, 1.02, 1, 1.0, 0.0, 0.0),
        ("completion", 4, "wait"): Published(0.25, 1.02, 4, 4.0, 0.0, 0.0),
    },
    "agentic": {
        ("sync-colocated", 0, ""): Published(0.2, 1.0, 0, 0.0, 0.0, 0.0),
        ("sync", 0, ""): Published(0.18, 0.88, 0, 0.0, 0.0, 0.0),
        ("one-step", 1, ""): Published(0.21, 1.05, 1, 1.0, 0.0, 0.0),
        ("april", 0, ""): Published(0.5, 2.51, 3, 1.0, 0.26, 0.0),
        ("completion", 1, "keep"): Published(0.38, 1.91, 2, 1.0, 0.13, 0.0),
        ("completion", 2, "keep"): Published(0.52, 2.6, 4, 1.78, 0.7, 0.0),
        ("completion", 4, "keep"): Published(0.52, 2.6, 4, 1.78, 0.7, 0.0),
        ("completion", 8, "keep"): Published(0.52, 2.6, 4, 1.78, 0.7, 0.0),
        ("completion", 1, "abort"): Published(0.38, 1.91, 3, 1.0, 0.12, 0.0),
        ("completion", 2, "abort"): Published(0.5, 2.51, 4, 1.75, 0.71, 0.0),
        ("completion", 4, "abort"): Published(0.5, 2.51, 4, 1.75, 0.71, 0.0),
        ("completion", 8, "abort"): Published(0.5, 2.51, 4, 1.75, 0.71, 0.0),
    },
}
"""Figures by (policy, η, mode); the mode is empty if it makes no difference."""

_ORDERS: dict[tuple[str, int], Published] = {
    ("window-2B", 1): Published(0.51, None, 3, 1.0, length_bias=0.99),
    ("window-B", 1): Published(0.42, None, 2, 1.0, length_bias=0.99),
    ("admission", 1): Published(0.38, None, 1, 1.0, length_bias=0.99),
    ("window-2B", 2): Published(0.65, None, 4, 2.0, length_bias=0.99),
    ("window-B", 2): Published(0.58, None, 3, 2.0, length_bias=0.99),
    ("admission", 2): Published(0.53, None, 2, 2.0, length_bias=0.99),
    ("window-2B", 3): Published(0.76, None, 5, 3.0, length_bias=0.99),
    ("window-B", 3): Published(0.68, None, 4, 3.0, length_bias=0.99),
    ("admission", 3): Published(0.65, None, 3, 3.0, length_bias=0.99),
    ("window-2B", 4): Published(0.81, None, 6, 3.96, length_bias=0.99),
    ("window-B", 4): Published(0.8, None, 5, 3.99, length_bias=0.99),
    ("admission", 4): Published(0.73, None, 4, 4.0, length_bias=0.99),
    ("window-2B", 6): Published(0.93, None, 8, 5.04, length_bias=0.99),
    ("window-B", 6): Published(0.93, None, 7, 5.89, length_bias=0.99),
    ("admission", 6): Published(0.87, None, 6, 5.96, length_bias=0.99),
    ("window-2B", 8): Published(0.93, None, 8, 5.04, length_bias=0.99),
    ("window-B", 8): Published(0.93, None, 8, 5.94, length_bias=0.99),
    ("admission", 8): Published(0.93, None, 8, 6.85, length_bias=0.99),
    ("mask", 4): Published(0.74, None, 4, masked_share=0.20),
}
"""Figures of other consumption orders by (policy, η), for reasoning-32k with ``keep``."""
