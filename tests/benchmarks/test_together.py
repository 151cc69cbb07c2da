"""Sequences that are decoded together: what is counted is what a plain loop counts, and one is what `eval` scores."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks.small_models import Remembered
from benchmarks.together import CHOICES, GroupScorer, measure_all, summary
from sparsepack.calibrate.collect import CalibrateOptions
from sparsepack.calibrate.collection import calibrate
from sparsepack.eval.perplexity import score_windows, summarise
from sparsepack.eval.run import realised_sparsity
from sparsepack.eval.subject import TransformersSubject, open_subject
from sparsepack.files.text import read_text
from sparsepack.formats.blocks.table import BLOCKS
from sparsepack.models.hf_model.hooks import site_hooks
from sparsepack.models.hf_model.model import backbone_of
from sparsepack.models.sites import SiteKey
from sparsepack.models.tokenizer.windows import rolling_windows
from sparsepack.packing import PackRequest, pack

ROWS, CONTEXT, TOKENS = 4, 6, 3


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> TransformersSubject:
    """The tiny model that every installation has, packed for 3.4 bits."""
    folder: Path = tmp_path_factory.mktemp("together")
    calibrate("shipped:tiny", "shipped:train", folder / "c", CalibrateOptions(context=64, samples=8))
    request = PackRequest(
        "shipped:tiny", folder / "p.gguf", "zigzag-q6_p", calibration=folder / "c", bits=3.4, score=False
    )
    return open_subject(str(pack(request).path))


@pytest.fixture(scope="module")
def windows(subject: TransformersSubject) -> tuple[Tensor, Tensor]:
    return rolling_windows(subject.tokenizer, read_text("shipped:train"), CONTEXT + TOKENS, ROWS)


@pytest.mark.parametrize("choice", CHOICES)
def test_bits_are_those_that_a_plain_loop_counts(
    subject: TransformersSubject, windows: tuple[Tensor, Tensor], choice: str
) -> None:
    inputs, targets = (each[:, CONTEXT:] for each in windows)
    scorer = GroupScorer(subject, windows[0][:, :CONTEXT])
    reference = Remembered(GroupScorer(open_subject("shipped:tiny"), windows[0][:, :CONTEXT]))
    seen: dict[SiteKey, Tensor] = {}

    def record(layer: int, site: str, x: Tensor) -> None:
        seen[layer, site] = x.clone()

    with site_hooks(list(enumerate(backbone_of(scorer.model).layers)), subject.family, record):
        found = scorer.measure((inputs, targets), reference, 2, choice)
    size_of: Callable[[Sequence[float]], float] = {
        "largest": lambda pair: max(map(abs, pair)),
        "sum": lambda pair: math.sqrt(pair[0] ** 2 + pair[1] ** 2),
        "mean": lambda pair: math.sqrt((pair[0] ** 2 + pair[1] ** 2) / 2),
        "scaled": lambda pair: max(map(abs, pair)) / 2**0.3,
    }[choice]
    ends = (0, *BLOCKS["Q6_P"].level_bytes)
    parameters, total = subject.parameters(), 0.0
    for key, x in seen.items():
        limits, read = subject.rules[key].limits.tolist(), 0
        for first in (0, 2):
            for token in range(inputs.shape[1]):
                for column in range(x.shape[-1]):
                    size = size_of(x[first : first + 2, token, column].tolist())
                    read += ends[sum(size > limit[column] for limit in limits)]
        vectors = 2 * inputs.shape[1] * x.shape[-1]
        total += parameters[key] * 8 * read / 256 / vectors
    assert found["bits"]["overall"] == pytest.approx(total / sum(parameters[key] for key in seen), abs=2e-3)
    assert sum(found["columns"]["overall"]) == pytest.approx(1)


def test_one_sequence_is_what_eval_scores(subject: TransformersSubject, windows: tuple[Tensor, Tensor]) -> None:
    dense = open_subject("shipped:tiny")
    whole = windows[0][:, : 2 * TOKENS], windows[1][:, : 2 * TOKENS]
    context = whole[0][:, :TOKENS]
    scorer = subject.scorer()
    with torch.inference_mode():
        expected = summarise(score_windows(scorer, *whole, "decode", dense.scorer(), batch=ROWS), 1)
    decoded = whole[0][:, TOKENS:], whole[1][:, TOKENS:]
    found = GroupScorer(subject, context).measure(decoded, Remembered(GroupScorer(dense, context)), 1, "largest")
    assert found["kl_divergence"]["value"] == pytest.approx(expected["kl_divergence"]["value"], rel=0.01)
    assert found["bits"]["overall"] == pytest.approx(realised_sparsity(scorer, subject)["bits_read"], abs=2e-3)


def test_the_summary_has_a_row_for_each_number_of_sequences(
    subject: TransformersSubject, windows: tuple[Tensor, Tensor]
) -> None:
    context, decoded = windows[0][:, :CONTEXT], (windows[0][:, CONTEXT:], windows[1][:, CONTEXT:])
    reference = Remembered(GroupScorer(open_subject("shipped:tiny"), context))
    found = measure_all(GroupScorer(subject, context), decoded, reference, [2, 4])
    rows = summary([{**each, "kind": "samples", "model": "tiny", "row": "zigzag-q6_p"} for each in found]).rows
    assert [row[1] for row in rows] == ["1", "2", "4"]
    whole = next(each for each in found if each["choice"] == "all")
    assert whole["columns"]["overall"] == pytest.approx([0, 0, 0, 0, 0, 1])
