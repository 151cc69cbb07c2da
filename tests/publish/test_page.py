"""The report's page holds what was measured, stands alone, and lets nothing in a report run."""

import json
import platform
import re
import shlex
import shutil
import subprocess
from datetime import UTC, datetime, timedelta
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from sparsepack.cli import main
from sparsepack.errors import UserError
from sparsepack.publish.page import Bar, column_chart, report_page
from sparsepack.runtime.cpu.machine import cpu_info
from tests.publish.conftest import SMALL

CHROME = shutil.which("chromium") or shutil.which("google-chrome")


class _Found(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.text = ""
        self.addresses: list[str] = []
        self.classes: list[str] = []
        self.columns: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.classes += (dict(attrs).get("class") or "").split()
        self.columns += [dict(attrs)["data-column"] or ""] if tag == "td" else []
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href", "srcset")]

    def handle_data(self, data: str) -> None:
        self.text += data


def parsed(page: str) -> _Found:
    found = _Found()
    found.feed(page)
    return found


def changed(work: Path, folder: Path, change: Any) -> Path:
    report = json.loads((work / "report.json").read_text())
    change(report)
    (folder / "report.json").write_text(json.dumps(report))
    return folder


def test_the_page_holds_accuracy_sparsity_thresholds_speed_and_gates(work: Path) -> None:
    report = json.loads((work / "report.json").read_text())
    lost = report["pack"]["score"]["decode"]["perplexity_ratio"]["value"]
    assert f"decode, as tokens are generated: perplexity {lost:.3f}" in parsed(report_page(work)).text
    found = parsed(report_page(work))
    for row in (row for evaluation in report["evaluations"] for row in evaluation["perplexity"]):
        assert f"{row['perplexity']['value']:.3f}" in found.text
    for test in report["bench"]["tests"]:
        assert f"{test['avg_ts']:.1f}" in found.text
    assert "a gate FAILED" in found.text
    assert report["generate"]["text"].strip() in found.text
    sites = {row["site"] for row in report["thresholds"]["rows"]}
    assert found.tags.count("svg") == 2 * len(sites), "sparsity and threshold of each site"
    assert found.tags.count("rect") == 2 * len(report["thresholds"]["rows"])
    assert "line" in found.tags
    decoded = sum(bool(test["n_gen"]) for test in report["bench"]["tests"])
    assert found.tags.count("i") == len(report["stages"]) + 2 * decoded, "a bar each, and the spread of each speed"


def test_the_page_says_when_on_what_and_by_which_commands(work: Path) -> None:
    report = json.loads((work / "report.json").read_text())
    text = parsed(report_page(work)).text
    assert datetime.now(UTC) - datetime.fromisoformat(report["ended"]) < timedelta(hours=1)
    assert f"Ended {report['ended'][:10]} at {report['ended'][11:16]} UTC, on {cpu_info()}, " in text
    assert report["machine"]["gpu"] == ""
    assert f"Python {platform.python_version()}, torch {torch.__version__}" in text
    lines = [shlex.split(line) for line in text.splitlines() if line.startswith("sparsepack ")]
    sets = [part for override in SMALL for part in ("--set", override)]
    file = str(work / "model.gguf")
    assert lines == [
        ["sparsepack", "run", "quickstart", *sets, "--work", str(work)],
        ["sparsepack", "verify", file, "--against", "shipped:tiny"],
        ["sparsepack", "generate", file],
        ["sparsepack", "serve", file],
    ]


def test_speeds_come_with_their_median_and_range(work: Path) -> None:
    report = json.loads((work / "report.json").read_text())
    text = parsed(report_page(work)).text
    for test in report["bench"]["tests"]:
        assert f"{test['median_ts']:.1f} ({test['min_ts']:.1f} to {test['max_ts']:.1f})" in text
    assert "standard deviation of 1 run" in text


def test_speeds_with_slots_are_on_the_page_too(work: Path, tmp_path: Path) -> None:
    def slots(report: dict[str, Any]) -> None:
        bench = report["bench"]
        bench["with_places"] = bench | {"tests": [test | {"mode": "sparse, slots"} for test in bench["tests"]]}

    found = parsed(report_page(changed(work, tmp_path, slots)))
    tests = json.loads((work / "report.json").read_text())["bench"]["tests"]
    assert found.text.count(", sparse, slots") == len(tests) + sum(bool(test["n_gen"]) for test in tests)


def test_nothing_is_lost_on_narrow_pages_or_with_long_names(work: Path, tmp_path: Path) -> None:
    """A narrow page shows each row as a list of `column: cell`, and no label of a chart has a fixed width."""
    long = "a-long-name-" * 20

    def lengthen(report: dict[str, Any]) -> None:
        for row in (row for evaluation in report["evaluations"] for row in evaluation["perplexity"]):
            row["text"] = long
        for test in report["bench"]["tests"]:
            test["mode"] = long
        report["stages"][0]["name"] = long

    page = report_page(changed(work, tmp_path, lengthen))
    found = parsed(page)
    assert found.tags.count("thead") == found.tags.count("table")
    assert {"text", "of sparse sites (target)", "tokens/s", "median (range)", "verdict"} <= set(found.columns)
    assert "content: attr(data-column)" in page
    labels = [
        label for label in re.findall(r"<text [^>]*>([^<]*)</text>", page) if not re.fullmatch(r"[\d.e+-]+", label)
    ]
    assert labels == [], "only numbers stand in pictures, whose texts cannot take another line"
    assert f"<span>{long}</span>" in page


def test_the_page_needs_nothing_from_elsewhere(work: Path) -> None:
    page = report_page(work)
    found = parsed(page)
    assert not {"script", "link", "img", "iframe", "object"} & set(found.tags)
    assert found.addresses == []
    assert not re.search(r"https?://|url\(|@import", page)
    assert "prefers-color-scheme: dark" in page


def test_nothing_in_a_report_becomes_html(work: Path, tmp_path: Path) -> None:
    def attack(report: dict[str, Any]) -> None:
        evil = '"><script>alert(1)</script>'
        report["recipe"] |= {"name": evil, "description": evil, "model": evil}
        report["generate"]["text"] = evil
        report["pack"]["notes"] = [evil]
        report["thresholds"]["rows"][0]["site"] = evil
        report["stages"][0]["name"] = evil
        report["gates"][0]["where"] = evil
        report["bench"]["tests"][1]["mode"] = evil

    page = report_page(changed(work, tmp_path, attack))
    assert "<script" not in page
    assert "script" not in parsed(page).tags


def test_the_page_says_on_which_text_it_was_skipped(work: Path, tmp_path: Path) -> None:
    assert "a bar for each block of the model, on the evaluation text." in report_page(work)

    def dense(report: dict[str, Any]) -> None:
        for row in (row for evaluation in report["evaluations"] for row in evaluation["perplexity"]):
            row["realised_sparsity"]["sites"] = {}

    page = report_page(changed(work, tmp_path, dense))
    assert "a bar for each block of the model, on the calibration text." in page


def test_a_recipe_that_only_calibrates_has_a_page(work: Path, tmp_path: Path) -> None:
    def strip(report: dict[str, Any]) -> None:
        report |= {"evaluations": [], "gates": []}
        report |= dict.fromkeys(("thresholds", "pack", "verify", "bench", "generate", "artifact"))

    found = parsed(report_page(changed(work, tmp_path, strip)))
    assert found.tags.count("svg") == 0
    assert "Accuracy" not in found.text


def test_damaged_reports_are_refused_in_one_line(work: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no report\.json in it"):
        report_page(tmp_path)
    for text in ("", "[1]", '{"kind": "plan"}', '{"kind": "recipe report"}'):
        (tmp_path / "report.json").write_text(text)
        with pytest.raises(UserError, match=r"report\.json: ") as refused:
            report_page(tmp_path)
        assert "\n" not in str(refused.value)
    report = json.loads((work / "report.json").read_text())
    for key in report:
        for value in (3, "x", {"a": 1}, [[]]):
            (tmp_path / "report.json").write_text(json.dumps(report | {key: value}))
            result = CliRunner().invoke(main, ["report", str(tmp_path)])
            assert result.exit_code in (0, 2), f"{key}: {result.exception!r}"


def test_the_command_writes_beside_the_run_unless_told_otherwise(work: Path, tmp_path: Path) -> None:
    assert CliRunner().invoke(main, ["report", str(work)]).exit_code == 0
    assert CliRunner().invoke(main, ["report", str(work), "-o", str(tmp_path / "page.html")]).exit_code == 0
    assert (work / "report.html").read_bytes() == (tmp_path / "page.html").read_bytes()


def test_a_bar_and_its_mark_are_as_high_as_their_shares_of_the_top() -> None:
    drawn = column_chart("", [Bar("a", 3.0, mark=1.0)], highest=4.0)
    found = re.search(
        r'y="([\d.]+)" width="[\d.]+" height="([\d.]+)".*class="mark".* y1="([\d.]+)"', str(drawn), re.DOTALL
    )
    assert found
    top, tall, mark = map(float, found.groups())
    assert top + tall - mark == pytest.approx(tall / 3, abs=0.1)


@pytest.mark.skipif(CHROME is None, reason="no chromium")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_browser_draws_it_without_a_complaint(work: Path, tmp_path: Path, scheme: str) -> None:
    (tmp_path / "page.html").write_text(report_page(work))
    done = subprocess.run(
        [
            *(
                str(CHROME),
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--hide-scrollbars",
                "--enable-logging=stderr",
            ),
            *("--window-size=1000,2400", f"--user-data-dir={tmp_path / 'profile'}"),
            *(["--force-dark-mode", "--blink-settings=preferredColorScheme=0"] if scheme == "dark" else []),
            *(f"--screenshot={tmp_path / 'page.png'}", (tmp_path / "page.html").as_uri()),
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (tmp_path / "page.png").stat().st_size > 20_000, done.stderr
    assert "CONSOLE" not in done.stderr
