"""What `make test-gpu-sanitize` makes of racecheck's reports."""

import pytest
import racecheck

KNOWN = """\
========= Error: Race reported between Write access at void List::put_if<Peaks deal_out<(int)8, (bool)0, \
zigzag_gemv::[lambda() (instance 1)]>(const Site &)::[lambda(int) (instance 1)]>(u32) const+0x6a0 in deal.cuh:89
=========     and Read access at Stream::number(int) const+0x3a10 in zigzag.cuh:78 [64 hazards]
=========
========= Error: Race reported between Write access at void Stream::fetch<(int)16>(int) const+0x4400 in zigzag.cuh:141
=========     and Read access at multiply(Sums &, const unsigned char *)+0x1360 in compiler_u3z.cu:98 [1536 hazards]
=========     and Read access at multiply(Sums &, const unsigned char *)+0x1370 in compiler_u3z.cu:98 [1536 hazards]
"""
OTHER = """\
========= Error: Race reported between Write access at {}+0x4400 in compiler_u3z.cu:141
=========     and Read access at {}+0x1360 in compiler_u3z.cu:98 [1536 hazards]
"""


def summary(reports: int) -> str:
    return f"========= RACECHECK SUMMARY: {reports} hazards displayed (9 errors, 0 warnings)\n"


def test_nothing_and_what_is_known_to_be_false_pass() -> None:
    assert racecheck.verdict(summary(0)) == (["0 reports, 0 of them here"], True)
    lines, clean = racecheck.verdict(KNOWN + summary(2))
    assert clean
    assert lines == [
        "1 x List::put_if and Stream::number: false: a barrier of all warps, after one of some",
        "2 x Stream::fetch and multiply: false: a lane arrives for its warp",
        "2 reports, 2 of them here",
    ]


@pytest.mark.parametrize(
    "functions",
    [
        ("attention", "attention"),
        ("Stream::fetch(int) const", "Stream::number(int) const"),
        ("void add_up<(int)512>(float *, float *)", "multiply(Sums &)"),
    ],
)
def test_another_race_is_one(functions: tuple[str, str]) -> None:
    lines, clean = racecheck.verdict(KNOWN + OTHER.format(*functions) + summary(3))
    assert not clean
    assert lines[2].endswith(": NOT KNOWN TO BE FALSE")


@pytest.mark.parametrize(
    "log",
    [
        "",
        KNOWN,
        KNOWN + summary(3),
        OTHER.split("and")[0] + summary(1),
        KNOWN + "Error: Race reported in another way\n" + summary(3),
    ],
)
def test_output_that_is_not_understood_is_no_pass(log: str) -> None:
    assert not racecheck.verdict(log)[1]


def test_the_commands_own_failure_is_told(tmp_path, monkeypatch, capfd) -> None:
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(f'#!/bin/sh\necho "{summary(0).strip()}" > "$8"\nshift 8\nexec "$@"\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert racecheck.main(["sh", "-c", "echo ran"]) == 0
    assert capfd.readouterr().out.split("\n")[:2] == ["ran", "racecheck: 0 reports, 0 of them here"]
    assert racecheck.main(["sh", "-c", "exit 5"]) == 5
