"""The picture of what is lost has each quantised row at the bits that it reads, by its kind."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.plot_lost import main, points

TEXT = "books.validation.jsonl.xz"


def _row(bits: float, ratio: float, **named: str) -> dict[str, object]:
    told = {"steps": 300, "text": TEXT, "bits_read": bits, "perplexity_ratio": {"value": ratio}}
    return {**told, **named}


ROWS = [
    _row(4.5, 1.011, row="Q4_K"),
    _row(2.25, 1.05, row="pca, global 0.5, offsets, Q4_K"),
    _row(2.25, 1.03, row="learnt, global 0.5, offsets, gptq, Q4_K"),
    _row(2.25, 1.04, row="learnt, global 0.5, offsets, Q4_K", text="another"),
    _row(2.25, 1.06, row="pca, global 0.5, offsets, refit, Q4_K"),
    _row(8.0, 1.02, row="pca, global 0.5, offsets, float"),
]
KQUANTS = [_row(2.93, 1.153, type="Q2_K")]


def test_each_row_is_at_its_place_by_its_kind() -> None:
    found = points(ROWS, KQUANTS, TEXT, without=["refit"])
    places = {kind: [(bits, round(lost, 6), name) for bits, lost, name in each] for kind, each in found.items()}
    assert places == {
        "llama.cpp's K-quants": [(2.93, 15.3, "Q2_K")],
        "no basis": [(4.5, 1.1, "Q4_K")],
        "on a basis": [(2.25, 5.0, "pca, global 0.5, offsets")],
        "with error feedback": [(2.25, 3.0, "learnt, global 0.5, offsets, gptq")],
    }


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "r.json").write_text(json.dumps(ROWS))
    (tmp_path / "k.json").write_text(json.dumps(KQUANTS))
    asked = [str(tmp_path / "r.json"), "--kquants", str(tmp_path / "k.json"), "-o", str(tmp_path / "p.png")]
    done = CliRunner().invoke(main, asked)
    assert done.exit_code == 0, done.output
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
