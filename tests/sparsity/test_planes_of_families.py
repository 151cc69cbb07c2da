"""Planes from `pack` to engines for every family: what is packed at a number of bits runs alike everywhere."""

from pathlib import Path
from typing import Any

import pytest
import torch
from backends import engine_of
from models_for_tests import EVERY_MIXTURE, EXPERTS, WINDOWED, make_model
from rounding import moved_by_rounding

from sparsepack.calibrate.collect import CalibrateOptions
from sparsepack.calibrate.collection import calibrate
from sparsepack.eval.subject import open_subject
from sparsepack.formats.open import read_packed
from sparsepack.formats.verify import verify
from sparsepack.packing import Packed, PackRequest, pack

FORMAT, BITS = "zigzag-q6_p", 6.25
IDS = torch.randint(300, (24,), generator=torch.Generator().manual_seed(1))
PROMPT = 10
ROUNDED = 0.02
"""Relative error of logits of a random model until rounding takes an input across a threshold, to another level."""


FEW = {
    "gpt_oss": "num_local_experts",
    "qwen2_moe": "num_experts",
    "deepseek_v2": "n_routed_experts",
    "nemotron_h": "n_routed_experts",
}
"""What says how many experts the mixtures that are not `long` have: four here, since more take long."""


def packed(folder: Path, family: str, text: Any, **goal: Any) -> Packed:
    changes = {FEW[family]: 4} if family in FEW else {}
    model = str(make_model(folder / "m", family, **changes))
    calibrate(model, text, folder / "c", CalibrateOptions(context=64, samples=8, held_out=4))
    return pack(PackRequest(model, folder / "p.gguf", FORMAT, folder / "c", **goal))


OTHER_MATRICES = ("phi3", "gemma3_text", "gemma4_text", "lfm2", "qwen3_5_text")
"""Families whose matrices and mixers are together of every kind; Qwen2's are in `test_planes.py`."""


@pytest.mark.parametrize(
    "family",
    [
        *(pytest.param(name, marks=[pytest.mark.long][: name not in OTHER_MATRICES]) for name in WINDOWED),
        *EVERY_MIXTURE,
    ],
)
def test_every_family_runs_alike_in_eval_and_engines(family: str, tmp_path: Path, text: Any) -> None:
    made, path = packed(tmp_path, family, text, bits=3.4), tmp_path / "p.gguf"
    assert verify(path, str(tmp_path / "m")).passed
    assert made.score is not None
    losses = [made.score[protocol]["kl_divergence"]["value"] for protocol in ("decode", "dense")]
    assert losses[0] >= 0.99 * losses[1] - 1e-12 >= -1e-12, "a random model may be sure of every word"
    assert made.thresholds is not None
    outlook = made.thresholds.outlook()
    assert outlook is not None
    assert BITS * (1 - outlook.overall) == pytest.approx(3.4, abs=0.02)
    check_engine(path, "reference", 1e-4, 1e-3)
    check_engine(path, "cpu", ROUNDED, 0.03)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "family", ["qwen2", "gemma3_text", "arcee", "glm4", "qwen3_5_text", "lfm2", "nemotron", *EXPERTS]
)
def test_families_run_on_a_gpu_as_in_eval_there(family: str, tmp_path: Path, text: Any) -> None:
    """Of dense MLPs with a gate and without, of states and short convolutions, and of every kind of mixture."""
    made = packed(tmp_path, family, text, bits=3.4, device="cuda")
    assert made.score is not None
    assert made.score["decode"]["kl_divergence"]["value"] >= 0
    check_engine(tmp_path / "p.gguf", "cuda", ROUNDED, 0.03)


def check_engine(path: Path, backend: str, bound: float, share: float) -> None:
    """Logits and the share of bits that are read are those of the stock model with its hooks.

    bound -- of the relative error of logits at each position, beside what rounding moves them; share -- of activity
    """
    packed = read_packed(path)
    engine = engine_of(packed, backend, context=64)
    scorer = open_subject(str(path), device=str(engine.device)).scorer()
    hidden = scorer.hidden(IDS[None], None, torch.tensor([PROMPT]))
    expected = scorer.head(slice(None))(hidden)[0].cpu()
    logits = engine.teacher_forced(IDS.tolist(), PROMPT).cpu()
    off = (logits - expected).norm(dim=1) / expected.norm(dim=1)
    bounds = torch.full_like(off, bound)
    if backend != "reference" and (off >= bounds).any():
        moved = moved_by_rounding(packed, IDS.tolist(), PROMPT)
        bounds += 2 * moved.norm(dim=2).amax(0) / expected.norm(dim=1)
    assert (off < bounds).all(), f"off by {off.tolist()}; expected less than {bounds.tolist()}"
    if backend == "reference":
        assert float((logits - expected).norm() / expected.norm()) < 1e-5
    for key, unread in scorer.realised().items():
        assert engine.activity()[key] == pytest.approx(1 - unread, abs=share), key


@pytest.mark.parametrize(
    "family", ["qwen2_moe", *(pytest.param(name, marks=pytest.mark.long) for name in ("mixtral", "qwen2", "arcee"))]
)
def test_bits_are_found_for_a_loss_of_every_kind_of_mlp(family: str, tmp_path: Path, text: Any) -> None:
    made = packed(tmp_path, family, text, loss="3%")
    assert made.score is not None
    assert made.thresholds is not None
    outlook = made.thresholds.outlook()
    assert outlook is not None
    assert 1 < BITS * (1 - outlook.overall) < BITS
    assert made.score["decode"]["perplexity_ratio"]["value"] < 1.06
