"""lm-eval's own command knows sparsepack, and gives the figures of `sparsepack eval`."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from sparsepack.errors import UserError
from sparsepack.eval.lm_eval_plugin import SparsepackLM
from sparsepack.eval.options import EvalRequest
from sparsepack.eval.run import evaluate

ROOT = Path(__file__).parents[2]
TASKS = ROOT / "tests" / "tasks"


@pytest.fixture
def installed(tmp_path: Path) -> dict[str, str]:
    """An environment in which a package with our entry points is installed, whatever this environment has."""
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    about = tmp_path / "here-0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: here\nVersion: 0\n")
    lines = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in entries.items()) for group, entries in groups.items()]
    (about / "entry_points.txt").write_text("\n".join(lines))
    paths = [str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path), "HF_HUB_OFFLINE": "1"}


def python(code: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)


def test_lm_eval_finds_the_model_by_its_name(installed: dict[str, str]) -> None:
    code = (
        "import lm_eval.evaluator\n"
        "lm_eval.evaluator.set_torch_seed(1)\n"  # as its command does before it takes the model; imports torch
        "from lm_eval.api.registry import get_model, model_registry\n"
        "assert 'hf' in model_registry and len(model_registry) > 10\n"
        "print(get_model('sparsepack').__name__)"
    )
    done = python(code, installed)
    assert done.stdout.strip() == "SparsepackLM", done.stderr


def test_other_programs_that_import_torch_notice_nothing(installed: dict[str, str]) -> None:
    code = "import sys, torch; sys.exit(any(name.startswith('lm_eval') for name in sys.modules))"
    assert python(code, installed).returncode == 0
    broken = "import sys, torch, types; sys.modules['lm_eval'] = types.ModuleType('lm_eval')\n"
    broken += "from sparsepack.eval.lm_eval_registration import register; register()"
    done = python(broken, installed)
    assert done.returncode == 0
    assert "cannot make itself known to lm-eval" in done.stderr


@pytest.mark.slow
def test_the_figure_is_that_of_sparsepack_eval(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    monkeypatch.setenv("SPARSEPACK_SHARED", str(shared))
    request = EvalRequest("shipped:tiny", tasks=("sp_blimp",), task_path=TASKS, limit=12)
    expected = evaluate(request)["tasks"]["tasks"]["sp_blimp"]["metrics"]["acc"]
    manager = TaskManager(include_path=str(TASKS), include_defaults=False)
    lm = SparsepackLM("shipped:tiny", device="cpu", batch_size=1)
    found = simple_evaluate(lm, tasks=["sp_blimp"], limit=12, task_manager=manager)["results"]["sp_blimp"]
    assert (found["acc,none"], found["acc_stderr,none"]) == (expected["value"], expected["stderr"])


def test_arguments_are_checked() -> None:
    with pytest.raises(UserError, match="path=FILE"):
        SparsepackLM()
    with pytest.raises(UserError, match="pretrained: not known; expected path, thresholds"):
        SparsepackLM("shipped:tiny", pretrained="x")
    with pytest.raises(UserError, match="batch_size none: expected a number"):
        SparsepackLM("shipped:tiny", batch_size="none")
    with pytest.raises(UserError, match="protocol 'sparse'"):
        SparsepackLM("shipped:tiny", protocol="sparse")


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_lm_evals_default_device_becomes_the_cpu_and_that_is_said(capfd: pytest.CaptureFixture[str]) -> None:
    model = SparsepackLM("shipped:tiny", device="cuda:0", batch_size="auto")
    assert model.device == torch.device("cpu")
    assert model.batch_size == 8
    assert "no CUDA device here; on the CPU instead" in capfd.readouterr().err
