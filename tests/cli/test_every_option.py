"""No option of any verb is taken and does nothing.

In each mode of each verb a small command runs while the reads of all option dataclasses are recorded. An option that
says it counts there must have been read by the code that does the work; one that says it does not is given, and must be
refused. Nothing is listed but the modes: the options are those that click has.
"""

import ast
import inspect
import json
import os
import signal
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import click
import httpx
import pytest
from artifacts_for_tests import tiny_by_neurons, write_zigzag
from commands_for_tests import fails, succeeds
from models_for_tests import make_model
from task_files import MULTIPLE_CHOICE, OUR_DATA

from sparsepack.calibrate.prune import PruneOptions
from sparsepack.calibrate.pruning import prune
from sparsepack.calibrate.thresholds import AllocationOptions
from sparsepack.cli import main
from sparsepack.cli.command import Declared, Ruled
from sparsepack.errors import UserError
from sparsepack.eval.options import EvalRequest
from sparsepack.models.checkpoint.checkpoint import open_checkpoint
from sparsepack.recipe.load import load_recipe
from sparsepack.runtime.cpu import tune
from sparsepack.runtime.cpu.machine import instruction_sets
from sparsepack.serve import server
from sparsepack.simulation.options import SimulateOptions

TASK = f"task: own\n{OUR_DATA}{MULTIPLE_CHOICE}"
TRACE = "--sessions 2 --tokens 24 --prompt 8"
LEARNT = "--windows 1 --steps 1 --batch 1 --length 16"
MODES = {
    "calibrate": ("shipped:tiny --text {text} --context 32 --samples 2 -o {new}",),
    "prune": tuple(
        f"{{relu}} --keep 2 --of 4 --method {method} -o {{new}}{more}"
        for method, more in (
            ("magnitude", ""),
            ("wanda", " --calibration {cal} --windows 1"),
            ("sparsegpt", " --calibration {cal} --windows 1"),
        )
    ),
    "rotate": tuple(
        f"shipped:tiny --calibration {{tinycal}} --basis {basis} -o {{new}}"
        for basis in ("pca", "pca --segments 2", "hadamard")
    ),
    "distil": tuple(
        f"{model} --calibration {{tinycal}} --steps 1 --batch 1 --length 16 -o {{new}}"
        for model in ("shipped:tiny", "{pruned}")
    ),
    "thresholds": (
        *(
            f"{{relu}} --calibration {{cal}} --sparsity 0.5 -o {{new}} --allocation {rest}"
            for rest in ("uniform --windows 1", "teal --windows 1", f"global {LEARNT}")
        ),
        "{relu} --calibration {cal} --sparsity 0.5 -o {new} --format zigzag-q6_p",
    ),
    "pack": (
        "shipped:tiny -o {new}",
        "{relu} -o {new} --calibration {cal} --sparsity 0.5 --windows 1",
        f"{{relu}} -o {{new}} --calibration {{cal}} --sparsity 0.5 --allocation global {LEARNT}",
        "{relu} -o {new} --calibration {cal} --attention double --dense-layers none",
        "{relu} -o {new} --calibration {more} --quantiser gptq",
        "{relu} -o {new} --calibration {more} --format zigzag-q6_p --quantiser round --bits 3.4",
        "{relu} -o {new} --calibration {more} --format zigzag-q6_p --quantiser round --kl 9",
        "{relu} -o {new} --calibration {more} --format zigzag-q6_p --quantiser round --loss 90%",
        "{relu} -o {new} --calibration {more} --sparsity 0.5 --windows 1 --refit",
    ),
    "quickstart": ("shipped:tiny --text {text} --device cpu -o {new}",),
    "eval": (
        "shipped:tiny --perplexity {text} --context 32 --windows 1",
        "{file} --perplexity {text} --context 32 --windows 1 --backend reference",
        "shipped:tiny --tasks own --task-path {tasks}",
    ),
    "bench": (
        "{file} -p 4 -n 4 -r 1",
        "{file} -p 4 -n 4 -r 1 --text {text}",
    ),
    "generate": (
        "{file} --prompt The -n 2",
        "{file} --prompt The -n 2 --temperature 0",
        "{file} --prompt The -n 2 --temperature 1 --repeat-penalty 1",
    ),
    "serve": ("{file} --port 0", "{file} --port 0 --dense"),
    "tune": ("{file}", "{neurons} --threads 2"),
    "trace": (f"{{relu}} --text {{text}} {TRACE} -o {{new}}",),
    "place": ("{neurons} --vram 8GB",),
    "simulate": (
        "{trace} --calibration {other} --cached 0.3",
        "{trace} --calibration {other} --cached 0.3 --group 4",
        "{trace} --calibration {other} --cached 0.3 --machine pcie5",
        "{trace} --calibration {other} --machine pcie5 --vram 40GB",
    ),
}
"""The verbs whose options stand in option dataclasses, and what each can be asked to do."""


def without_kernels() -> str:
    try:
        instruction_sets()
    except UserError as error:
        return str(error)
    return ""


KERNELS = pytest.mark.skipif(bool(without_kernels()), reason=without_kernels())
CASES = [
    pytest.param(verb, mode, marks=KERNELS if verb == "tune" else ()) for verb, modes in MODES.items() for mode in modes
]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("modes")
    names = ("cal", "tinycal", "more", "text.txt", "relu", "pruned", "trace", "other", "m.gguf")
    found = {name: folder / name for name in names}
    found["text"] = found.pop("text.txt")
    found["text"].write_text("The sun rose over the hills, and the river ran on to the sea. " * 60)
    other = folder / "others.txt"
    other.write_text("A wind came from the north and took the leaves of all the trees with it. " * 60)
    make_model(found["relu"], hidden_act="relu", num_hidden_layers=1, intermediate_size=256)
    common = ("--context", 32, "--samples", 2)
    succeeds("calibrate", found["relu"], "--text", found["text"], "-o", found["cal"], *common)
    succeeds("calibrate", "shipped:tiny", "--text", found["text"], "-o", found["tinycal"], *common)
    prune("shipped:tiny", found["pruned"], PruneOptions(6, 8, method="magnitude"))
    many = ("--context", 128, "--samples", 8)  # as many tokens as weights are fitted on
    succeeds("calibrate", found["relu"], "--text", found["text"], "-o", found["more"], *many)
    for text, made in ((found["text"], found["trace"]), (other, found["other"])):
        succeeds("trace", found["relu"], "--text", text, "-o", made, *TRACE.split())
    found["file"] = found.pop("m.gguf")
    write_zigzag(open_checkpoint("shipped:tiny"), {}, found["file"])
    (folder / "neurons").mkdir()
    found["neurons"] = tiny_by_neurons(folder / "neurons")
    found["tasks"] = folder / "tasks"
    found["tasks"].mkdir()
    (found["tasks"] / "own.yaml").write_text(TASK)
    rows = [{"query": "The cat sat on the", "choices": ["mat", "mathematics"], "gold": 0}] * 2
    (found["tasks"] / "data.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return found


@pytest.fixture(autouse=True)
def briefly(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """What would take minutes or never end does neither: `tune` times little, and keeps that where no test finds it;
    a server, once it listens, is asked for one text and told to end."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    for name, value in {"CALLS": 1, "ROUNDS": 1}.items():
        monkeypatch.setattr(tune, name, value)
    for name, some in {"SPANS": (1,), "TILES": (24,)}.items():
        monkeypatch.setattr(tune, name, some)
    startup = server._Server.startup

    async def asked_once(self: Any, sockets: Any = None) -> None:
        await startup(self, sockets)
        host, port = sockets[0].getsockname()[:2]
        said = {"model": self._name, "prompt": "The", "max_tokens": 2}

        def ask() -> None:
            httpx.post(f"http://{host}:{port}/v1/completions", json=said, timeout=60).raise_for_status()
            os.kill(os.getpid(), signal.SIGTERM)

        threading.Thread(target=ask).start()

    monkeypatch.setattr(server._Server, "startup", asked_once)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The names of the fields that were read of any option dataclass, by code that does something with them."""
    names: set[str] = set()

    def watched(self: Any, name: str) -> Any:
        code = sys._getframe(1).f_code
        checks = code.co_name in ("check", "__post_init__", "__eq__", "__repr__", "__hash__")
        if not checks and not code.co_filename.endswith(("dataclasses.py", "option.py", "copy.py")):
            names.add(name)
        return object.__getattribute__(self, name)

    for options in {each.options for verb in main.commands for each in declared(verb)}:
        monkeypatch.setattr(options, "__getattribute__", watched)
    return names


def declared(verb: str) -> list[Declared]:
    return [each for each in main.commands[verb].params if isinstance(each, Declared)]


def words(mode: str, files: dict[str, Path], folder: Path) -> list[str]:
    return mode.format(**files, new=folder / "new").split()


def values(verb: str, arguments: list[str]) -> dict[str, Any]:
    return main.commands[verb].make_context(verb, list(arguments)).params


def counts(option: Ruled, asked: dict[str, Any]) -> bool:
    return all(condition.met(asked.get) for condition in option.counts)


def body_of(verb: str) -> ast.FunctionDef:
    function = inspect.unwrap(main.commands[verb].callback)  # type: ignore[arg-type]
    (found,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    assert isinstance(found, ast.FunctionDef)
    return found


def by_name(verb: str) -> set[str]:
    """The parameters that the function of a verb has by name; another test says that it uses each."""
    arguments = body_of(verb).args
    return {each.arg for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}


def test_every_verb_with_declared_options_has_its_modes_here() -> None:
    assert {verb for verb in main.commands if declared(verb)} == MODES.keys()


@pytest.mark.parametrize(("verb", "mode"), CASES)
def test_an_option_that_counts_is_read(
    verb: str, mode: str, files: dict[str, Path], tmp_path: Path, read: set[str]
) -> None:
    arguments = words(mode, files, tmp_path)
    asked = values(verb, arguments)
    options = [each for each in declared(verb) if each.expose_value and counts(each, asked)]
    options = [each for each in options if each.name != "sparsity" or asked["sparsity"] is not None]
    read.clear()
    succeeds(verb, *arguments)
    assert {str(each.name) for each in options} - read - by_name(verb) == set()


def given(option: click.Option) -> list[str]:
    """The option as a user might give it."""
    flag = max(option.opts, key=len)
    if option.is_flag:
        return [flag]
    if isinstance(option.type, click.Choice):
        return [flag, str(option.type.choices[0])]
    low = getattr(option.type, "min", None)
    return [flag, str(option.default or (1 if low is None else max(low, 1)))]


@pytest.mark.parametrize(("verb", "mode"), CASES)
def test_an_option_that_does_not_count_is_refused(verb: str, mode: str, files: dict[str, Path], tmp_path: Path) -> None:
    arguments = words(mode, files, tmp_path)
    asked = values(verb, arguments)
    for each in main.commands[verb].params:
        ruled = isinstance(each, Ruled) and each.counts and each.name not in ("vram", "cached")
        if ruled and not counts(each, asked) and not any(condition.takes for condition in each.counts):
            line = fails(verb, *arguments, *given(each))
            assert max(each.opts, key=len) in line, line
            assert "it is for" in line or "it does nothing" in line, line
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("verb", main.commands)
def test_what_no_dataclass_declares_is_used_by_the_verb(verb: str) -> None:
    """Each such parameter of the function is a name that stands in its body."""
    names = (node for statement in body_of(verb).body for node in ast.walk(statement) if isinstance(node, ast.Name))
    assert by_name(verb) - {name.id for name in names} == set()


def test_a_merge_takes_no_option_of_a_run() -> None:
    for verb in ("calibrate", "trace"):
        line = fails(verb, "merge", "a", "b", "-o", "c", "--batch", 1)
        assert "--batch: merge runs nothing" in line


@pytest.mark.parametrize(
    ("asked", "line"),
    [
        (AllocationOptions(0.5, steps=3), "steps 3: it is for allocation global, not fisher"),
        (PruneOptions(2, 4, "wanda", damping=0.5), "damping 0.5: it is for method sparsegpt, not wanda"),
        (SimulateOptions(cached="0.3", vram="24GB", machine="pcie5"), "cached 0.3: it does nothing with vram 24GB"),
        (EvalRequest("x", tasks=("t",), context=64), "context 64: it does nothing without perplexity"),
    ],
)
def test_functions_refuse_them_as_the_command_line_does(asked: Any, line: str) -> None:
    with pytest.raises(UserError) as caught:
        asked.check()
    assert str(caught.value).startswith(line)


def test_a_recipe_with_an_option_that_does_nothing_is_refused_and_one_that_writes_out_defaults_is_not(
    tmp_path: Path,
) -> None:
    recipe = "schema: 1\nname: r\nmodel: shipped:tiny\nprune: {{keep: 2, of: 4, method: magnitude, damping: {}}}\n"
    (tmp_path / "r.yaml").write_text(recipe.format(0.5))
    assert "damping" in fails("run", tmp_path / "r.yaml", "--dry-run")
    (tmp_path / "r.yaml").write_text(recipe.format(0.01))
    load_recipe(tmp_path / "r.yaml")


def test_pruning_by_size_takes_no_calibration(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="method magnitude reads no text"):
        prune("shipped:tiny", tmp_path / "p", PruneOptions(2, 4, "magnitude"), Path("/nowhere"))
    asked = ("--keep", 2, "--of", 4, "--method", "magnitude", "--calibration", "/nowhere", "-o", tmp_path / "p")
    assert "--calibration /nowhere: it is for --method wanda or sparsegpt" in fails("prune", "shipped:tiny", *asked)
