"""What running a packed file imports, and what is said where the packages of an extra are not installed."""

import subprocess
import sys
from pathlib import Path

import pytest
from commands_for_tests import fails, succeeds
from models_for_tests import make_model

from sparsepack.errors import UserError
from sparsepack.files.text import read_text
from sparsepack.models.hf_model.model import spread

OF_EXTRAS = {"accelerate", "datasets", "lm_eval", "matplotlib", "pandas", "pyarrow", "scipy", "sklearn"}
OF_MODELS = {"huggingface_hub", "torchvision", "transformers"}


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("imports")
    make_model(folder / "model")
    succeeds("pack", folder / "model", "-o", folder / "m.gguf")
    return folder / "m.gguf"


@pytest.mark.parametrize(
    "run",
    [
        "main(['generate', path, '--prompt', 'a', '--tokens', '2'], standalone_mode=False)",
        "import sparsepack.serve.server, sparsepack; sparsepack.load(path)",
        "main(['inspect', path], standalone_mode=False)",
    ],
)
def test_running_a_file_imports_no_library_of_checkpoints_or_data(artifact: Path, run: str) -> None:
    code = f"import sys; from sparsepack.cli import main; path = {str(artifact)!r}; {run}; "
    code += f"found = {OF_EXTRAS | OF_MODELS!r} & set(sys.modules); sys.exit(', '.join(found) or 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr


def test_without_extras_a_model_is_calibrated_packed_run_and_measured(tmp_path: Path) -> None:
    commands = [
        ("calibrate", "shipped:tiny", "--text", "shipped:train", "--context", "64", "--samples", "2", "-o", "cal"),
        ("pack", "shipped:tiny", "--calibration", "cal", "--sparsity", "0.25", "--windows", "1", "-o", "m.gguf"),
        ("generate", "m.gguf", "--prompt", "The", "--tokens", "2"),
        ("eval", "m.gguf", "--perplexity", "shipped:heldout", "--windows", "1", "--context", "64"),
    ]
    code = f"import sys; sys.modules.update(dict.fromkeys({OF_EXTRAS!r})); from sparsepack.cli import main\n"
    code += f"for command in {commands!r}: main(command, standalone_mode=False)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stderr


def test_where_an_extra_is_missing_one_line_names_it(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in OF_EXTRAS:
        monkeypatch.setitem(sys.modules, name, None)
    assert fails("eval", artifact, "--tasks", "arc_easy") == (
        "sparsepack: --tasks needs lm_eval, which is not installed: pip install 'sparsepack[eval]'"
    )
    with pytest.raises(UserError, match=r"wikitext: .* needs datasets, .*: pip install 'sparsepack\[datasets\]'"):
        read_text("wikitext")
    with pytest.raises(UserError, match=r"needs accelerate, .*: pip install 'sparsepack\[cuda\]'"):
        spread(None, {})
