"""The picture of a simulation: drawn whole or not at all, and refused before anything is played."""

import sys

import pytest
from click.testing import CliRunner

from sparsepack.cli.app import main
from sparsepack.errors import OutputError, UserError
from sparsepack.placement.options import POLICIES as NAMES
from sparsepack.simulation.options import SimulateOptions
from sparsepack.simulation.plot import check_plot, plot
from sparsepack.simulation.run import simulate


@pytest.fixture(scope="module")
def result(traced, other_text):
    return simulate(traced, other_text, SimulateOptions(cached="0.3,0.1", policy=",".join(NAMES)))


@pytest.fixture
def matplotlib():
    return pytest.importorskip("matplotlib")


@pytest.mark.parametrize(("name", "head"), [("p.png", b"\x89PNG"), ("p.svg", b"<?xml"), ("P.SVG", b"<?xml")])
def test_a_picture_is_of_the_kind_that_its_name_says(matplotlib, result, tmp_path, name, head):
    plot(result, tmp_path / name)
    assert (tmp_path / name).read_bytes().startswith(head)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_picture_shows_what_the_result_says_with_errors(matplotlib, result, tmp_path, monkeypatch):
    from matplotlib.axes import Axes

    drawn = []
    real = Axes.errorbar
    monkeypatch.setattr(Axes, "errorbar", lambda *given, **named: drawn.append((given, named)) or real(*given, **named))
    plot(result, tmp_path / "p.svg")
    assert [named["label"] for _, named in drawn] == [*NAMES, *NAMES]
    rows = {(row["policy"], row["cached"]): row for row in result["results"]}
    for ((_, shares, values, errors), named), field in zip(
        drawn, ["hit_rate"] * len(NAMES) + ["host_reads"] * len(NAMES), strict=True
    ):
        figures = [rows[named["label"], share][field] for share in (0.1, 0.3)]
        assert shares == pytest.approx([10, 30])
        assert values == [figure["value"] for figure in figures]
        assert errors == [figure["stderr"] for figure in figures]
        assert (named["linestyle"] == "--") == (named["label"] in ("oracle-static", "belady", "belady-within-blocks"))
    assert len({named["color"] for _, named in drawn}) == len(NAMES)


def test_a_single_session_has_no_errors(matplotlib, result, tmp_path):
    rows = [
        row | {field: {"value": row[field]["value"], "stderr": None} for field in ("hit_rate", "host_reads")}
        for row in result["results"]
    ]
    plot({**result, "results": rows}, tmp_path / "p.png")
    assert (tmp_path / "p.png").stat().st_size > 10_000


def test_the_same_result_is_the_same_file(matplotlib, result, tmp_path):
    for name in ("a.svg", "b.svg"):
        plot(result, tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_a_picture_that_fails_leaves_what_was_there(matplotlib, result, tmp_path, monkeypatch):
    (tmp_path / "p.png").write_bytes(b"an older one")

    def half(self, path, **settings):
        path.write_bytes(b"half")
        raise MemoryError

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", half)
    with pytest.raises(MemoryError):
        plot(result, tmp_path / "p.png")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("p.png", b"an older one")]


@pytest.mark.parametrize("name", ["p.pdf", "p", ".svg"])
def test_other_kinds_of_pictures_are_refused(tmp_path, name):
    with pytest.raises(OutputError, match=r"expected a name that ends in \.png or \.svg"):
        check_plot(tmp_path / name)


def test_without_matplotlib_one_line_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UserError, match=r"pip install 'sparsepack\[plot\]'") as caught:
        check_plot(tmp_path / "p.png")
    assert "\n" not in str(caught.value)


def test_the_command_line_draws(matplotlib, traced, other_text, tmp_path):
    given = ["simulate", str(traced.path), "--calibration", str(other_text.path)]
    given += ["--cached", "0.1", "--policy", "static"]
    done = CliRunner().invoke(main, [*given, "--plot", str(tmp_path / "p.svg")])
    assert done.exit_code == 0, done.output
    assert "| static |" in done.output
    assert (tmp_path / "p.svg").is_file()


@pytest.mark.parametrize(
    ("asked", "shown"),
    [
        ([], ["static", "slow", "momentum", "belady"]),
        (["--group", "2"], ["static", "slow", "momentum", "oracle-static"]),
        (["--policy", "lru,lfu"], ["lru", "lfu"]),
    ],
)
def test_four_policies_are_drawn_unless_others_are_asked_for(
    matplotlib, traced, other_text, tmp_path, monkeypatch, asked, shown
):
    from matplotlib.figure import Figure

    legends = []
    real = Figure.legend
    monkeypatch.setattr(
        Figure,
        "legend",
        lambda self, handles, labels, **named: legends.append(labels) or real(self, handles, labels, **named),
    )
    given = ["simulate", str(traced.path), "--calibration", str(other_text.path), "--cached", "0.1", *asked]
    done = CliRunner().invoke(main, [*given, "--plot", str(tmp_path / "p.png")])
    assert done.exit_code == 0, done.output
    assert legends == [shown]


@pytest.mark.usefixtures("matplotlib")
def test_the_command_line_refuses_a_picture_before_anything_is_played(traced, tmp_path, monkeypatch):
    monkeypatch.setattr("sparsepack.simulation.run.play", lambda policy, start: pytest.fail("played"))
    given = ["simulate", str(traced.path), "--calibration", str(traced.path), "--plot"]
    for name in ("p.pdf", "nowhere/p.png"):
        done = CliRunner().invoke(main, [*given, str(tmp_path / name)])
        assert done.exit_code == 2, done.output
        assert len(done.output.splitlines()) == 1
