"""A llama.cpp that crashes on this machine is one line, not the end of a benchmark by a signal."""

import re
import signal
from pathlib import Path

import click
import pytest
from test_random_shapes import small

from benchmarks.shared.llama_bench import write_shape
from benchmarks.shared.llama_cpp import LlamaCpp, expect_runs
from benchmarks.shared.shapes import MODELS


@pytest.mark.parametrize("name", ["SIGSEGV", "SIGILL"])
def test_a_crash_in_the_first_product_says_what_happened_and_how_to_build_the_peer(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    crashes = f"import os\nos.kill(os.getpid(), {int(signal.Signals[name])})"
    (tmp_path / "llama_cpp.py").write_text(crashes)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(click.ClickException) as caught:
        LlamaCpp(tmp_path / f"{name}.gguf", 64)
    assert re.search(
        rf"was ended by {name} in its first product .* CMAKE_ARGS='-DGGML_NATIVE=OFF", caught.value.message
    )
    assert "\n" not in caught.value.message


def test_a_peer_that_runs_is_used(tmp_path: Path) -> None:
    path = write_shape(tmp_path / "peer.gguf", small(next(iter(MODELS))))
    try:
        expect_runs(path)
    except click.ClickException as error:  # a build by gcc 12 on a processor with AMX
        pytest.skip(error.message)
    peer = LlamaCpp(path, 64)
    peer.decode([1, 2])
    assert peer.logits().isfinite().all()
    peer.close()
