"""The `tidegate doctor` command: prints an engine's findings with remedies, or as JSON.

:mod:`engine_doctor` measures the engine and judges the results.
"""

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from tidegate.cli.conventions import STATUS_FOUND, echo, progress
from tidegate.cli.engine_doctor.findings import Finding, Verdict
from tidegate.cli.engine_doctor.measurements import Identity, Measurements


def doctor(
    url: Annotated[
        str, typer.Argument(metavar="URL", help="The engine's URL, e.g. http://127.0.0.1:8000.")
    ],
    model: Annotated[
        Path | None,
        typer.Option(
            help="Directory of the weights that it serves; log-probs and tokens are compared."
        ),
    ] = None,
    update: Annotated[
        bool,
        typer.Option(
            "--update",
            help="Also load other weights (--model's with noise, written beside it), then the "
            "original ones again. Only while no other client uses the engine.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check that an engine is fit for RL training; status 1 if it is not.

    Works with vLLM, SGLang, and Tidegate's vLLM-compatible server. Without --update it changes
    nothing on the engine.
    """
    from tidegate.cli.engine_doctor.findings import findings
    from tidegate.cli.engine_doctor.measuring import examined, measure

    with progress("looking who is there") as show:
        measured = measure(examined(url), model, updates=update, progress=show)
    found = findings(measured)
    is_ill = any(finding.verdict == Verdict.FAIL for finding in found)
    if as_json:
        echo(json.dumps(_as_json(url, measured, found, is_ill=is_ill)))
    else:
        for line in lines(url, measured.identity, found):
            echo(line)
    if is_ill:
        raise typer.Exit(STATUS_FOUND)


def lines(url: str, identity: Identity, found: list[Finding]) -> list[str]:
    """Return the report as text lines."""
    version = identity.version or "of an unknown version"
    report = [f"{url}: {identity.kind} {version}, model {identity.model}"]
    for finding in found:
        report.append(f"{finding.verdict:<5} {finding.check}: {finding.says}")
        if finding.remedy and finding.verdict != Verdict.OK:
            report.append(f"      -> {finding.remedy}")
        elif finding.remedy:
            report.append(f"      ({finding.remedy})")
    failed = sum(finding.verdict == Verdict.FAIL for finding in found)
    warned = sum(finding.verdict == Verdict.WARN for finding in found)
    report.append(
        f"{failed} to mend before training, {warned} to know of"
        if failed or warned
        else "fit to train on"
    )
    return report


def _as_json(
    url: str, measured: Measurements, found: list[Finding], *, is_ill: bool
) -> dict[str, Any]:
    measurements = dataclasses.asdict(measured)
    measurements["identity"]["paths"] = sorted(measured.identity.paths)
    return {
        "url": url,
        "fit": not is_ill,
        "findings": [dataclasses.asdict(finding) for finding in found],
        "measurements": measurements,
    }
