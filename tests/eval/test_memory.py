"""What measuring a model takes beside the model in its own type: at most half as much again, and blocks read ahead."""

import sys

import pytest
from memory import command_peak_bytes
from models_for_tests import TEXT, make_model

from sparsepack.eval.scorer import HIDDEN_BYTES
from sparsepack.packing import PackRequest, pack

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc"),
]
CONTEXT, HIDDEN, INTERMEDIATE = 64, 1024, 4096
NEXT = 4 * HIDDEN * (3 * INTERMEDIATE + HIDDEN * 5 // 2)
"""Bytes of a block in float32, as the next one is held while one computes."""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A random Llama of 370 MB in bfloat16, a text, and the folder for its artifacts."""
    folder = tmp_path_factory.mktemp("large")
    model = make_model(
        folder / "model",
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=9,
        num_attention_heads=16,
        num_key_value_heads=4,
        vocab_size=24_000,
        tie_word_embeddings=False,
    )
    (folder / "text.txt").write_text(TEXT[:20_000])
    return folder, (model / "model.safetensors").stat().st_size


@pytest.fixture(scope="module", params=["zigzag-q4_k", "bf16"])
def artifact(made, request):
    path = made[0] / f"{request.param}.gguf"
    pack(PackRequest(str(made[0] / "model"), path, format=request.param))
    return path


def test_the_model_is_large_enough_to_matter(made):
    assert 300e6 < made[1] < 400e6


def test_verify_against_the_model(made, artifact):
    taken = command_peak_bytes("verify", str(artifact), "--against", str(made[0] / "model"))
    assert taken < 1.5 * made[1]


def test_eval_against_the_model(made, artifact):
    windows = 2
    flags = ["--perplexity", str(made[0] / "text.txt"), "--context", str(CONTEXT), "--windows", str(windows)]
    taken = command_peak_bytes("eval", str(artifact), "--against", str(made[0] / "model"), *flags)
    waiting = 2 * min(HIDDEN_BYTES, windows * CONTEXT * HIDDEN * 4)
    assert taken < 1.5 * made[1] + waiting + 2 * NEXT  # of the artifact and of the model


def test_calibrate(made):
    flags = ["--text", str(made[0] / "text.txt"), "--context", str(CONTEXT), "--samples", "2"]
    taken = command_peak_bytes("calibrate", str(made[0] / "model"), *flags, "-o", str(made[0] / "c"))
    assert taken < 0.75 * made[1] + NEXT
