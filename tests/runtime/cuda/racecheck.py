"""Run a command under compute-sanitizer's racecheck. Fails where the command does, or at a report that is not FALSE.

    python tests/runtime/cuda/racecheck.py COMMAND ...

racecheck (CUDA 13.0) does not see two orders. Of kernels of ten lines that have nothing else it reports the same:

    warps 0 .. 7:  bar.sync 1, 256;  write w;  bar.sync 3, 384          (or __syncthreads)
    warps 8 .. 11:                             bar.sync 3, 384;  read w

    all lanes:  read w;  __syncwarp;  lane 0: mbarrier.arrive
    the copy engine writes w once that mbarrier has all its arrivals

Without the first barrier of some warps, and where every lane arrives, it reports nothing.

A race between the functions of a pair in FALSE passes, too: this does not notice a barrier that is lost there.
"""

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

FALSE = {
    frozenset(pair): why
    for why, pairs in {
        "false: a barrier of all warps, after one of some": [
            ("List::put", "Stream::number"),
            ("List::put_if", "Stream::number"),
            ("Stream::announce", "Stream::wait_for_list"),
        ],
        "false: a lane arrives for its warp": [("Stream::fetch", "multiply")],
    }.items()
    for pair in pairs
}
"""Functions that write and read, and what is between them (`kernels/zigzag.cuh`)."""

_ACCESS = re.compile(r"(?:Read|Write) access at (?:[\w ]+ )?([\w:]+)[<(+]")
_SUMMARY = re.compile(r"RACECHECK SUMMARY: (\d+) hazard")


def reports(log: str) -> Iterator[frozenset[str]]:
    """The functions of each pair of accesses."""
    for report in log.split("Race reported")[1:]:
        first, *others = _ACCESS.findall(report) or [""]
        if not others or len(others) + 1 != report.count(" access at "):
            yield frozenset(("a report that is not understood",))
        yield from (frozenset((first, other)) for other in others)


def verdict(log: str) -> tuple[list[str], bool]:
    """What is to be said about racecheck's output, and whether nothing in it is a race."""
    summary = _SUMMARY.search(log)
    if not summary:
        return ["no summary"], False
    seen, shown = Counter(reports(log)), log.count("Race reported")
    lines = [
        f"{count} x {' and '.join(sorted(pair))}: {FALSE.get(pair, 'NOT KNOWN TO BE FALSE')}"
        for pair, count in seen.items()
    ]
    lines.append(f"{summary[1]} reports, {shown} of them here")
    return lines, FALSE.keys() >= seen.keys() and int(summary[1]) == shown


def main(command: list[str]) -> int:
    """The exit status."""
    with TemporaryDirectory() as folder:
        log = Path(folder, "log")
        tool = ["compute-sanitizer", "--tool", "racecheck", "--report-api-errors", "no", "--print-limit", "1000000"]
        status = subprocess.run([*tool, "--log-file", str(log), *command]).returncode
        lines, clean = verdict(log.read_text() if log.exists() else "")
    print(*(f"racecheck: {line}" for line in lines), sep="\n")
    return status or int(not clean)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
