"""What a notebook shows of a result: one short line."""

from pathlib import Path

import sparsepack
from sparsepack import CalibrateOptions, PackRequest
from sparsepack.models.provenance import Pruned, PrunedMatrix, Rotated


def test_results_show_as_one_short_line(tmp_path: Path) -> None:
    few = CalibrateOptions(context=32, samples=2)
    calibration = sparsepack.calibrate("shipped:tiny", "shipped:train", tmp_path / "cal", few)
    sparsepack.pack(PackRequest("shipped:tiny", tmp_path / "m.gguf"))
    model = sparsepack.load(tmp_path / "m.gguf")
    made = model.generate("The", max_tokens=3).result()
    assert "shipped:tiny, zigzag-q4_k, 3 blocks of 1.8 M weights" in repr(model)
    assert "4.50 bits a weight, cpu" in repr(model)
    assert repr(calibration) == "Calibration(shipped:tiny, 3 blocks, 2 windows of 32 tokens)"
    assert repr(made).startswith(f"Generated({made.text!r}, {len(made.tokens)} tokens, ended by ")
    for each in (model, model.packed, calibration, made):
        assert len(repr(each)) < 200
        assert "\n" not in repr(each)


def test_what_prune_and_rotate_return_is_one_line() -> None:
    matrices = tuple(PrunedMatrix(f"m{n}", "blk.0.attn_in", 6, 8, 0, 0.75, 0.1, False) for n in range(50))
    pruned = Pruned("tiny", "0" * 64, None, {}, matrices)
    assert repr(pruned) == "Pruned(tiny, 50 matrices, keep 6 of 8)"
    rotated = Rotated("tiny", "0" * 64, "0" * 64, {}, (1, 2), "bfloat16", 9, 0.0125, ("A long note.",) * 9)
    assert repr(rotated) == "Rotated(tiny, bfloat16, error 0.0125, basis changes before blocks [1, 2])"
