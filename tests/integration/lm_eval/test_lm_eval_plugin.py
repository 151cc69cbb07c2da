"""lm-eval's own command knows sparsepack, and gives the figures of `sparsepack eval`."""

import subprocess
import tomllib
from importlib import import_module
from pathlib import Path

import pytest
import torch

from sparsepack.errors import UserError
from sparsepack.eval.options import EvalRequest
from sparsepack.eval.run import evaluate
from sparsepack.integration.lm_eval.__main__ import NAME, TARGET
from sparsepack.integration.lm_eval.plugin import SparsepackLM

ROOT = Path(__file__).parents[3]
TASKS = ROOT / "tests" / "tasks"


def test_our_command_is_lm_evals_with_the_model_known(monkeypatch: pytest.MonkeyPatch) -> None:
    from lm_eval import evaluator
    from lm_eval.api.registry import get_model, model_registry

    command, called = import_module("sparsepack.integration.lm_eval.__main__"), []
    monkeypatch.setattr(evaluator, "get_git_commit_hash", evaluator.get_git_commit_hash)
    monkeypatch.setattr(command, "cli_evaluate", lambda: called.append(get_model(NAME)))
    command.main()
    assert called == [SparsepackLM]
    assert "hf" in model_registry
    assert len(model_registry) > 10


def test_the_commit_is_that_of_the_working_folder_and_git_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lm_eval import evaluator

    command = import_module("sparsepack.integration.lm_eval.__main__")
    monkeypatch.setattr(evaluator, "get_git_commit_hash", evaluator.get_git_commit_hash)
    monkeypatch.setattr(command, "cli_evaluate", lambda: None)
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a process was started"))
    monkeypatch.chdir(tmp_path)
    command.main()
    assert evaluator.get_git_commit_hash() is None
    (tmp_path / ".git" / "refs" / "heads").mkdir(parents=True)
    (tmp_path / ".git" / "HEAD").write_text("ref: refs/heads/main\n")
    (tmp_path / ".git" / "refs" / "heads" / "main").write_text("abc123\n")
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path / "below")
    assert evaluator.get_git_commit_hash() == "abc123"


def test_the_entry_point_of_lm_eval_names_the_model_that_our_command_registers() -> None:
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    assert groups["lm_eval.models"] == {NAME: TARGET}
    assert groups.keys() == {"lm_eval.models", "vllm.general_plugins"}, "torch, too, would run what its groups name"


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
