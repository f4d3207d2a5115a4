"""CPU and memory cost of a rollout in the orchestrator, against AReaL and SkyRL.

``python -m benchmarks.orchestrator [--json]`` prints ``name, value, unit, peer, ratio``. Each value
is the median of some runs, ours and the peers' alternately, each in its own process, so that a busy
machine slows them alike. A rollout has a prompt of 128 tokens and one turn of 64. The trainer takes
no time, but gets its batches of 256 as tensors and publishes after each. All CPU time of the
measured process counts; engines are in other processes.

    rollouts_per_s: per CPU-second of the orchestrator's process, 512 at once, over the wire; the
        peer is AReaL over HTTP
    rollouts_per_s_skyrl: the same; the peer is SkyRL's asynchronous loop over HTTP
    rollouts_per_s_in_process: the same without any wire; the peer is AReaL's executor
    ..._groups_of_8: these three with 8 rollouts per prompt, as in GRPO
    ideal_share: share of 4,096 / 0.5 s, with 4,096 rollouts at once that sleep 0.5 s; the peer is
        AReaL's executor
    ideal_share_skyrl: the same; the peer is SkyRL's loop
    bytes_per_rollout: resident memory of 100,000 rollouts whose episodes await their turns, without
        tokens
    cpu_us_per_event: 100,000 rollouts at once over 10 engines. A rollout has 8 events here: its
        task is admitted, its turn requested, 4 step rows, the turn's end, the episode's end
    cpu_us_per_rollout_adapters_N: of N LoRA adapters trained at once in process, in batches of 4
        groups of 2, each published; the peer is one adapter
    cpu_us_per_event_1000: over 1,000 engines; the peer is 10 engines, and the ratio 1,000 : 10

Peers run if ``AREAL_PYTHON`` and ``SKYRL_PYTHON`` (or the options) name a Python that has them: see
benchmarks/peers/README.md.
"""

import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.table import Figures, Row, compared, make_parser, sample, show

PEERS = Path(__file__).parent.parent / "peers"

EVENTS_PER_ROLLOUT = 8
"""Events of a rollout; the module's docstring lists them."""

SLEEPING_ROLLOUTS = 4096
SLEEP_S = 0.5
CROWD_ROLLOUTS = 100_000
ENGINES_TURNS_PER_S = 1200
ADAPTERS = (1, 10, 100, 300)
BATCHES_PER_ADAPTER = 4
"""Batches of each adapter that are measured; all adapters together have 400 at least."""

AWAKE = ["--rollouts", "512", "--warm-up", "6", "--batches", "24"]
SINGLE = ["--group-size", "1", "--batch", "256"]
GROUPS_OF_8 = ["--group-size", "8", "--batch", "32"]
ASLEEP = [*SINGLE, "--warm-up", "48", "--batches", "128", "--turn-s", str(SLEEP_S)]
CROWD = ["--group-size", "1", "--batch", "5000", "--rollouts", str(CROWD_ROLLOUTS)]

Sample = Callable[[], Figures]


def subject(*options: str) -> Figures:
    """Run :mod:`benchmarks.orchestrator.subject` once."""
    return sample([sys.executable, "-m", "benchmarks.orchestrator.subject", *options])


def per_cpu_s(measured: Figures) -> float:
    """Return the rollouts per CPU-second."""
    return measured["rollouts"] / measured["cpu_s"]


def ideal_share(measured: Figures) -> float:
    """Return the throughput as a share of what rollouts that only sleep would reach."""
    return measured["rollouts"] / measured["wall_s"] / (SLEEPING_ROLLOUTS / SLEEP_S)


def cpu_us_per_event(measured: Figures) -> float:
    """Return the CPU time per event of a rollout."""
    return measured["cpu_s"] / measured["rollouts"] / EVENTS_PER_ROLLOUT * 1e6


class Peers:
    """The Pythons that have the peers installed."""

    def __init__(self, areal: str | None, skyrl: str | None) -> None:
        self._pythons = {"areal": areal, "skyrl": skyrl}

    def sample(self, name: str, *options: str) -> Sample | None:
        """Return a function that runs a peer once; None if no Python has it."""
        python = self._pythons[name]
        if not python:
            print(f"without {name}: {name.upper()}_PYTHON is not set", file=sys.stderr)
            return None
        command = [python, str(PEERS / f"{name}_rollouts.py"), *options]
        return lambda: sample(command)


def compare(
    runs: int, figure: Callable[[Figures], float], *samples: Sample | None
) -> list[float | None]:
    """Return the median of each competitor's figure, run alternately."""
    figures: list[list[float]] = [[] for _ in samples]
    for _ in range(runs):
        for take, taken in zip(samples, figures, strict=True):
            if take is not None:
                taken.append(figure(take()))
    return [statistics.median(taken) if taken else None for taken in figures]


def row(name: str, unit: str, ours: float | None, peer: float | None) -> Row:
    """Return a row of a figure that was certainly measured."""
    assert ours is not None
    return compared(name, unit, ours, peer)


def rollouts_per_s(runs: int, peers: Peers) -> list[Row]:
    """Compare over the wire with peers over HTTP, and without either."""
    return [
        *_rollouts(runs, peers, "", SINGLE),
        *_rollouts(runs, peers, "_groups_of_8", GROUPS_OF_8),
    ]


def _rollouts(runs: int, peers: Peers, suffix: str, groups: list[str]) -> list[Row]:
    work = [*AWAKE, *groups]
    # An engine returns the whole turn at once, as over HTTP.
    ours = ["throughput", *work, "--slots", "128", "--steps", "1", "--step-s", "0.05"]
    wire, areal, skyrl = compare(
        runs,
        per_cpu_s,
        lambda: subject(*ours, "--turn-s", "0.05"),
        peers.sample("areal", "http", *work),
        peers.sample("skyrl", "http", *work),
    )
    local, executor = compare(
        runs,
        per_cpu_s,
        lambda: subject(*ours, "--turn-s", "0", "--in-process"),
        peers.sample("areal", "in_process", *work),
    )
    unit = "rollouts/CPU-s"
    return [
        row(f"rollouts_per_s{suffix}", unit, wire, areal),
        row(f"rollouts_per_s_skyrl{suffix}", unit, wire, skyrl),
        row(f"rollouts_per_s_in_process{suffix}", unit, local, executor),
    ]


def ideal_shares(runs: int, peers: Peers) -> list[Row]:
    """Compare thousands of sleeping rollouts: ours over the wire, the peers' in process."""
    at_once = ["--rollouts", str(SLEEPING_ROLLOUTS)]
    # Two batches more than sleep at once may be outstanding, the peers' too: one is gathered, and
    # one is in training until its weights are live. The engines' slots bound how many sleep.
    ours = ["--rollouts", str(SLEEPING_ROLLOUTS + 512), "--slots", str(SLEEPING_ROLLOUTS // 4)]
    share, areal, skyrl = compare(
        runs,
        ideal_share,
        lambda: subject("throughput", *ASLEEP, *ours, "--steps", "1"),
        peers.sample("areal", "in_process", *ASLEEP, *at_once),
        peers.sample("skyrl", "in_process", *ASLEEP, *at_once),
    )
    return [
        row("ideal_share", "of 1", share, areal),
        row("ideal_share_skyrl", "of 1", share, skyrl),
    ]


def memory(runs: int, peers: Peers) -> list[Row]:
    """Measure the memory of rollouts that wait."""
    waiting = ["--turn-s", "3600", "--step-s", "1", "--slots", "64"]
    [figure] = compare(runs, lambda m: m["bytes"], lambda: subject("memory", *CROWD, *waiting))
    return [row("bytes_per_rollout", "bytes", figure, None)]


def events(runs: int, peers: Peers) -> list[Row]:
    """Compare many rollouts over few engines and over many, with equal total steps and rows."""
    few, many = compare(
        runs,
        cpu_us_per_event,
        lambda: subject("throughput", *CROWD, *_engines(10)),
        lambda: subject("throughput", *CROWD, *_engines(1000)),
    )
    return [
        row("cpu_us_per_event", "us", few, None),
        row("cpu_us_per_event_1000", "us", many, few),
    ]


def adapters(runs: int, peers: Peers) -> list[Row]:
    """Compare many adapters that are trained at once with one."""
    work = ["--engines", "2", "--steps", "1", "--turn-s", "0", "--in-process"]
    work += ["--group-size", "2", "--batch", "4"]

    def sample_of(number: int) -> Sample:
        batches = max(400, number * BATCHES_PER_ADAPTER)
        options = ["--adapters", str(number), "--batches", str(batches)]
        return lambda: subject("adapters", *work, *options)

    def cpu_us(measured: Figures) -> float:
        return measured["cpu_s"] / measured["rollouts"] * 1e6

    figures = compare(runs, cpu_us, *map(sample_of, ADAPTERS))
    return [
        row(f"cpu_us_per_rollout_adapters_{number}", "us", ours, figures[0] if number > 1 else None)
        for number, ours in zip(ADAPTERS, figures, strict=True)
    ]


def _engines(engines: int) -> list[str]:
    """Return options of this many engines, which together are slower than the orchestrator, so that
    all have full steps of 16 rows."""
    turn_s = 16 * engines / ENGINES_TURNS_PER_S
    work = ["--slots", "16", "--turn-s", str(turn_s), "--step-s", str(turn_s / 4)]
    return [*work, "--engines", str(engines), "--warm-up", "5", "--batches", "6"]


PARTS: dict[str, Callable[[int, Peers], list[Row]]] = {
    "rollouts_per_s": rollouts_per_s,
    "ideal_share": ideal_shares,
    "bytes_per_rollout": memory,
    "cpu_us_per_event": events,
    "adapters": adapters,
}


def main() -> None:
    """Print the table."""
    parser = make_parser(__doc__)
    parser.add_argument("--only", choices=PARTS, nargs="*", default=list(PARTS))
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--areal-python", default=os.environ.get("AREAL_PYTHON"))
    parser.add_argument("--skyrl-python", default=os.environ.get("SKYRL_PYTHON"))
    options = parser.parse_args()
    peers = Peers(options.areal_python, options.skyrl_python)
    for part in options.only:
        show(PARTS[part](options.runs, peers), as_json=options.json)


if __name__ == "__main__":
    main()
