"""What did a run achieve, at what cost, and how does it compare? As JSON, as a page, as a picture.

Reads only what the recorder left in run directories; knows no model and replays nothing.
"""

import dataclasses
import json
from pathlib import Path

from tidegate.orchestrator.records.facts import read_facts, read_metrics, runs_beside
from tidegate.orchestrator.records.report_page import page_lines
from tidegate.orchestrator.records.run_files import replace_file

REPORT_JSON = "report.json"
REPORT_PAGE = "report.md"
REPORT_PICTURE = "report.png"


def write_report(directory: Path) -> Path:
    """Write report.json, report.md and report.png into a run's directory; returns the page.

    Raises:
        AuditError: the run left no statistics, or its files can't be read.
    """
    # matplotlib takes a second to import, and only reports draw.
    from tidegate.orchestrator.records.report_picture import draw_report

    directory = Path(directory)
    facts = read_facts(directory)
    metrics = read_metrics(directory)
    replace_file(directory / REPORT_JSON, json.dumps(dataclasses.asdict(facts), indent=2).encode())
    draw_report(directory / REPORT_PICTURE, directory, facts, metrics)
    page = directory / REPORT_PAGE
    others = runs_beside(directory.resolve(), facts)
    replace_file(page, "\n".join(page_lines(facts, others, picture=REPORT_PICTURE)).encode())
    return page
