"""A pytest plugin for lanes: outcomes are written as they come, so that a run cut off by time leaves names.

$LOG/outcomes.txt   one line for each test that began ("begun") and for each part of a test that ended otherwise than passed,
                    or passed its call ("passed 1.23 NODEID"), in the order of ending
$LOG/failures.txt   the text of each failure, cut to its last 40 lines
$LOG/failed.txt     node ids, for another run
A worker whose CUDA context is broken (tests/conftest.py finds that) ends itself, and xdist starts another: else it would
skip what is left faster than others can run it.
"""

import os
import sys
import time
from pathlib import Path

import pytest

LOG = Path(os.environ.get("LOG", "/tmp/log"))
NAME = os.environ.get("OUTCOMES", "")
T0 = time.monotonic()


def _write(file, line):
    with open(LOG / f"{NAME}{file}", "a") as out:
        out.write(line + "\n")


def pytest_configure(config):
    config._lane_controller = not hasattr(config, "workerinput")
    if config._lane_controller:
        config.pluginmanager.register(_Controller(), "lane-controller")
    else:
        config.pluginmanager.register(_Worker(), "lane-worker")


def pytest_collection_modifyitems(config, items):
    """Leave out what $LANE_PASSED lists, a node id a line: an earlier lease has judged it."""
    if (path := os.environ.get("LANE_PASSED")) and Path(path).exists():
        passed = set(Path(path).read_text().splitlines())
        items[:] = [item for item in items if item.nodeid not in passed]
    if first := os.environ.get("LANE_FIRST"):
        items.sort(key=lambda item: not any(name in item.nodeid for name in first.split(",")))  # stable


class _Controller:
    counts: dict = {}

    def pytest_runtest_logstart(self, nodeid, location):
        _write("outcomes.txt", f"begun {time.monotonic() - T0:.0f} {nodeid}")

    def pytest_runtest_logreport(self, report):
        node = getattr(report, "node", None)
        worker = getattr(getattr(node, "gateway", None), "id", "-")
        if report.when == "call" or report.outcome != "passed":
            what = (
                report.outcome
                if report.when == "call" or report.outcome == "skipped"
                else f"{report.outcome}({report.when})"
            )
            self.counts[what] = self.counts.get(what, 0) + 1
            _write("outcomes.txt", f"{what} {report.duration:.2f} {worker} {time.monotonic() - T0:.0f} {report.nodeid}")
        if report.outcome == "failed":
            _write("failed.txt", report.nodeid)
            text = "\n".join(report.longreprtext.splitlines()[-40:])
            _write(
                "failures.txt",
                f"##### {report.when} {worker} at {time.monotonic() - T0:.0f} s: {report.nodeid}\n{text}\n",
            )

    def pytest_sessionfinish(self, session):
        _write("counts.txt", f"{time.monotonic() - T0:.0f} s: {self.counts}")


class _Worker:
    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item, nextitem):
        result = yield
        for module in list(sys.modules.values()):
            broken = getattr(module, "_broken", None)
            if getattr(module, "__name__", "").endswith("conftest") and broken:
                _write("broken.txt", f"{time.monotonic() - T0:.0f} s: {broken[0]}")
                time.sleep(0.5)  # until the reports have gone out
                os._exit(1)
        return result
