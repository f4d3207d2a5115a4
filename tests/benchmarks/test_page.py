"""Tests that the page of benchmarks holds what the results' files hold."""

from benchmarks.page import PAGE, RESULTS, TABLES, sections, text


def test_the_benchmark_page_matches_the_recorded_rows() -> None:
    assert PAGE.read_text() == text(), "run `python -m benchmarks.page`"


def test_every_file_of_results_is_on_the_page() -> None:
    files = {path.name for path in RESULTS.glob("*.jsonl")}
    assert files == set(TABLES) == {section["file"] for section in sections()}
