"""What a notebook shows of a result: one short line."""

from pathlib import Path

import sparsepack
from sparsepack import CalibrateOptions, PackRequest


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
