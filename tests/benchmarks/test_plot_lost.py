"""The picture of what is lost has each row of a model at the bits that it reads, by its kind."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from benchmarks.plot_lost import GAP, label_heights, main, points


def _row(row: str, bits: float, kl: float, model: str = "SmolLM2-135M") -> dict[str, Any]:
    return {"model": model, "row": row, "texts": {"books": {"bits_read": bits, "kl_divergence": {"value": kl}}}}


ROWS = [
    _row("zigzag-q6_p", 6.5, 0.01),
    _row("zigzag-q6_p --bits 3.4", 3.5, 0.05),
    _row("zigzag-q4_k", 4.5, 0.04),
    _row("zigzag-q4_k --sparsity 0.5", 2.3, 0.3),
    _row("llama.cpp Q4_K_M", 5.5, 0.045),
    _row("llama.cpp Q4_K_M", 5.4, 0.047, "Gemma"),
    _row("zigzag-q6_p --bits 3.4", 3.4, 0.06, "Gemma"),
    _row("zigzag-q4_k", 4.5, 0.06, "Gemma"),
    _row("another", 1.0, 1.0),
]


def test_each_row_is_at_its_place_by_its_kind() -> None:
    assert points(ROWS, "SmolLM2-135M", "books") == {
        "zigzag-q6_p": [(3.5, 0.05, "--bits 3.4"), (6.5, 0.01, "all read")],
        "zigzag-q4_k": [(2.3, 0.3, "--sparsity 0.5"), (4.5, 0.04, "all read")],
        "llama.cpp": [(5.5, 0.045, "Q4_K_M")],
    }


def test_labels_do_not_lie_on_one_another() -> None:
    places = [(0.0, 10.0), (5.0, 12.0), (200.0, 11.0), (3.0, 11.0), (0.0, 100.0)]
    heights = label_heights(places)
    assert [heights[n] for n in (0, 2, 4)] == [10, 11, 100]
    near = sorted(heights[n] for n in (0, 1, 3))
    assert near == [10, 10 + GAP, 10 + 2 * GAP]


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "r.json").write_text(json.dumps(ROWS))
    done = CliRunner().invoke(main, [str(tmp_path / "r.json"), "--text", "books", "-o", str(tmp_path / "p.png")])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
