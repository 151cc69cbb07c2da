"""`python -m benchmarks` lists benchmarks and runs them; those that are seldom run still find what they import."""

import ast
import importlib
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.__main__ import benchmark_names, main, summary

FOLDER = Path(__file__).parents[2] / "benchmarks"
MODULES = sorted(FOLDER.rglob("*.py"))


def test_every_benchmark_is_listed_with_its_first_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    main([])
    listed = " ".join(capsys.readouterr().out.split())
    assert len(benchmark_names()) > 10
    for name in benchmark_names():
        assert summary(name)
        assert f"{name} {summary(name)}" in listed


def test_an_unknown_name_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["nothing"])
    assert ended.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("name", benchmark_names())
def test_a_benchmark_tells_its_options(name: str) -> None:
    try:
        module = importlib.import_module(f"benchmarks.{name}")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in ("sparsepack", "benchmarks"):
            raise
        pytest.skip(f"{error.name} is not installed")
    assert "--help" in CliRunner().invoke(module.main, ["--help"], catch_exceptions=False).output


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.relative_to(FOLDER).as_posix())
def test_what_a_function_imports_is_there(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in ("sparsepack", "benchmarks"):
            try:
                module = importlib.import_module(str(node.module))
                for name in node.names:
                    if not hasattr(module, name.name):
                        importlib.import_module(f"{node.module}.{name.name}")
            except ModuleNotFoundError as error:
                if (error.name or "").partition(".")[0] in ("sparsepack", "benchmarks"):
                    raise
                pytest.skip(f"{error.name} is not installed")
