"""What the command line says of itself, and how it can be started."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import sparsepack
from sparsepack.cli import main
from sparsepack.errors import UserError
from sparsepack.runtime.cpu.machine import instruction_set


def commands(command: click.Command, names: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    yield names, command
    if isinstance(command, click.Group):
        for name, inner in command.commands.items():
            yield from commands(inner, (*names, name))


def help_of(names: tuple[str, ...], option: click.Option) -> str:
    """The option's entry in the help text, with the settings that its verb inherits."""
    context = main.make_context("sparsepack", [*names, "x"], resilient_parsing=True)
    for name in names:
        context = click.Context(main.commands[name], parent=context, info_name=name)
    record = option.get_help_record(context)
    assert record
    return record[1]


def test_every_option_says_what_it_is_and_what_stands_without_it() -> None:
    wrong = []
    for names, command in commands(main):
        for option in command.params:
            if not isinstance(option, click.Option) or option.hidden:
                continue
            shown, default = help_of(names, option), option.to_info_dict()["default"]
            if option.is_flag or option.is_eager or option.required or option.name == "sparsity":  # asked for or not
                fine = True
            elif default in (None, (), ""):
                takes_value = isinstance(
                    option.type, click.types.IntParamType | click.types.FloatParamType | click.Choice
                )
                fine = not takes_value or option.multiple or "default" in shown.lower()
            else:
                fine = f"default: {default}" in shown
            if not option.help or not fine:
                wrong.append(f"{' '.join(names)} {option.opts[-1]}: {shown}")
    assert not wrong, "\n".join(wrong)


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sparsepack", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | environment)


def test_shells_get_a_script_that_completes_and_the_help_says_how() -> None:
    said = " ".join(run("--help").stdout.split())
    for shell in ("bash", "zsh", "fish"):
        assert f"_SPARSEPACK_COMPLETE={shell}_complete" in run(_SPARSEPACK_COMPLETE=f"{shell}_source").stdout
        assert f"{shell}_source" in said
    completed = run(_SPARSEPACK_COMPLETE="bash_complete", COMP_WORDS="sparsepack cali", COMP_CWORD="1")
    assert completed.stdout.strip() == "plain,calibrate"


def test_the_package_can_be_run_as_a_module_and_its_help_lists_exit_statuses() -> None:
    text = " ".join(run("--help").stdout.split())
    assert text.startswith("Usage: sparsepack [OPTIONS]")
    for status in ("0 done", "1 the run or a check failed", "2 a mistake", "3 a gate failed", "130 interrupted"):
        assert status in text


def test_the_version_names_the_instruction_set_of_the_kernels_and_imports_no_torch() -> None:
    code = "import sys; from sparsepack.cli import main\n"
    code += "try: main(['--version'])\nfinally: assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    try:
        runs = instruction_set()
    except UserError as error:
        runs = f"none; {error}"
    assert done.stdout == f"sparsepack, version {sparsepack.__version__}\nkernels: {runs}\n"


def test_the_version_says_why_there_are_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sparsepack.runtime.cpu._native", None)  # as if there were no such file
    monkeypatch.setattr("sparsepack.runtime.cpu.machine._kernels_elsewhere", lambda: None)
    done = CliRunner().invoke(main, ["--version"])
    assert done.exit_code == 0
    assert f"sparsepack, version {sparsepack.__version__}\nkernels: none; the CPU kernels were not built" in done.stdout
    assert "pip install --force-reinstall --no-deps --no-cache-dir" in done.stdout


def test_a_checkout_that_hides_installed_kernels_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    module = tmp_path / "sparsepack" / "runtime" / "cpu" / "_native.so"
    module.parent.mkdir(parents=True)
    module.touch()
    monkeypatch.setitem(sys.modules, "sparsepack.runtime.cpu._native", None)
    monkeypatch.syspath_prepend(tmp_path)
    said = CliRunner().invoke(main, ["--version"]).stdout
    assert f"which has no CPU kernels, while {tmp_path} has them" in said


def test_the_version_says_why_a_forced_instruction_set_does_not_run() -> None:
    done = run("--version", SPARSEPACK_ISA="altivec")
    assert done.returncode == 0
    assert "kernels: none; " in done.stdout
