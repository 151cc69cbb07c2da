"""The verbs that are disturbed, what they leave, and whether that is what an undisturbed run leaves."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Files = dict[str, bytes]
"""Content by path, relative to a folder."""


@dataclass(frozen=True)
class Verb:
    """One verb.

    command -- (folder of the inputs, folder to work in, whether to make the output that is there before) -> command
    units   -- what appears whole or not at all: paths in the folder to work in
    """

    name: str
    command: Callable[[Path, Path, bool], list[str]]
    units: tuple[str, ...]


_TINY = "shipped:tiny"


def _calibrate(inputs: Path, work: Path, old: bool) -> list[str]:
    samples = ["--context", "32", "--samples", "1" if old else "2", "--text", str(inputs / "text.txt")]
    return ["calibrate", _TINY, *samples, "-o", str(work / "c"), "--overwrite"]


def calibrate_more(inputs: Path) -> list[str]:
    """The command for a calibration of as many tokens as weights are fitted on."""
    samples = ["--context", "128", "--samples", "8", "--text", str(inputs / "more.txt")]
    return ["calibrate", _TINY, *samples, "-o", str(inputs / "more")]


def _thresholds(*options: str) -> Callable[[Path, Path, bool], list[str]]:
    def command(inputs: Path, work: Path, old: bool) -> list[str]:
        given = ["--calibration", str(inputs / "c"), "--sparsity", "0.3" if old else "0.5", "--windows", "1"]
        return ["thresholds", _TINY, *given, *options, "-o", str(work / "t.json"), "--overwrite"]

    return command


def _pack(inputs: Path, work: Path, old: bool) -> list[str]:
    given = ["--calibration", str(inputs / "c"), "--sparsity", "0.3" if old else "0.5", "--windows", "1"]
    return ["pack", _TINY, *given, "-o", str(work / "m.gguf"), "--overwrite"]


def _pack_refit(inputs: Path, work: Path, old: bool) -> list[str]:
    given = ["--calibration", str(inputs / "more"), "--sparsity", "0.3" if old else "0.5", "--windows", "1"]
    return ["pack", _TINY, *given, "--refit", "-o", str(work / "m.gguf"), "--overwrite"]


def _prune(inputs: Path, work: Path, old: bool) -> list[str]:
    given = ["--calibration", str(inputs / "c"), "--keep", "4" if old else "6", "--of", "8", "--windows", "1"]
    return ["prune", _TINY, *given, "-o", str(work / "p"), "--overwrite"]


def _rotate(*options: str) -> Callable[[Path, Path, bool], list[str]]:
    def command(inputs: Path, work: Path, old: bool) -> list[str]:
        given = ["--calibration", str(inputs / "c"), *(("--basis", "hadamard") if old else options)]
        return ["rotate", _TINY, *given, "-o", str(work / "r"), "--overwrite"]

    return command


def _distil(*options: str) -> Callable[[Path, Path, bool], list[str]]:
    def command(inputs: Path, work: Path, old: bool) -> list[str]:
        given = ["--calibration", str(inputs / "c"), "--sparsity", "0.3" if old else "0.5", *_FEW_STEPS]
        return ["distil", _TINY, *given, *options, "-o", str(work / "d"), "--overwrite"]

    return command


def _distil_pruned(inputs: Path, work: Path, old: bool) -> list[str]:
    given = ["--calibration", str(inputs / "c"), *_FEW_STEPS, "--rate", "2e-4" if old else "1e-4"]
    return ["distil", str(inputs / "p"), *given, "-o", str(work / "d"), "--overwrite"]


def _trace(inputs: Path, work: Path, old: bool) -> list[str]:
    given = ["--text", str(inputs / "text.txt"), "--sessions", "2", "--tokens", "16", "--prompt", "4"]
    share = ["--share", "0.4" if old else "0.5", "--calibration", str(inputs / "c")]
    return ["trace", _TINY, *given, *share, "-o", str(work / "n"), "--overwrite"]


def _slide(inputs: Path, work: Path, old: bool) -> list[str]:
    kind = "slide-fp8" if old else "slide-int8"
    return ["pack", str(inputs / "p"), "--format", kind, "-o", str(work / "s"), "--overwrite"]


def _run(inputs: Path, work: Path, old: bool) -> list[str]:
    samples = ["--set", "calibrate.samples=1"] if old else []
    return ["run", str(inputs / "recipe.yaml"), "-w", str(work / "work"), *samples]


def _run_pruned(inputs: Path, work: Path, old: bool) -> list[str]:
    given = ["--set", "prune.keep=4"] if old else []
    return ["run", str(inputs / "pruned.yaml"), "-w", str(work / "work"), *given]


_FEW_STEPS = ("--steps", "3", "--batch", "1", "--length", "16")
_LEARNT = ("--allocation", "global", *_FEW_STEPS)
_OF_RUN = ("calibration", "thresholds.json", "model.gguf", "pack.json", "verify.json", "eval.json", "generate.json")
_OF_PRUNED = ("pruned", "model", "pack.json", "verify.json", "eval.json", "eval_pruned.json")
VERBS = {
    verb.name: verb
    for verb in (
        Verb("calibrate", _calibrate, ("c",)),
        Verb("thresholds", _thresholds(), ("t.json",)),
        Verb("thresholds teal", _thresholds("--allocation", "teal"), ("t.json",)),
        Verb("thresholds global", _thresholds(*_LEARNT), ("t.json",)),
        Verb("prune", _prune, ("p",)),
        Verb("rotate", _rotate(), ("r",)),
        Verb("rotate segments", _rotate("--segments", "2"), ("r",)),
        Verb("distil", _distil(), ("d",)),
        Verb("distil updates", _distil("--rank", "2"), ("d",)),
        Verb("distil pruned", _distil_pruned, ("d",)),
        Verb("trace", _trace, ("n",)),
        Verb("pack", _pack, ("m.gguf",)),
        Verb("pack refit", _pack_refit, ("m.gguf",)),
        Verb("pack slid", _slide, ("s",)),
        Verb("run", _run, tuple(f"work/{name}" for name in (*_OF_RUN, "report.json"))),
        Verb("run pruned", _run_pruned, tuple(f"work/{name}" for name in (*_OF_PRUNED, "report.json"))),
    )
}
_RECIPE = """
schema: 1
name: tiny
model: shipped:tiny
calibrate: {{text: {text}, context: 32, samples: 2}}
activation_sparsity: {{sparsity: 0.5, windows: 1}}
pack: {{format: zigzag-q4_k}}
verify: true
eval: {{perplexity: {text}, context: 32, windows: 1}}
generate: {{prompt: The class, tokens: 2}}
"""


_PRUNED = """
schema: 1
name: pruned
model: shipped:tiny
prune: {{keep: 6, of: 8, method: magnitude}}
pack: {{format: slide-int8}}
verify: true
eval: {{perplexity: {text}, context: 32, windows: 1}}
"""


def write_inputs(folder: Path) -> None:
    """What the commands read, but for the calibrations `c` and `more`."""
    (folder / "more.txt").write_text("The quick brown fox jumps over the lazy dog and runs. " * 200, encoding="utf-8")
    text = folder / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog and runs. " * 60, encoding="utf-8")
    (folder / "recipe.yaml").write_text(_RECIPE.format(text=text), encoding="utf-8")
    (folder / "pruned.yaml").write_text(_PRUNED.format(text=text), encoding="utf-8")


def files_in(folder: Path) -> Files:
    """All files, hidden ones too; folders without any by their names."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            found[str(path.relative_to(folder))] = _comparable(path.name, path.read_bytes())
        elif not any(path.iterdir()):
            found[f"{path.relative_to(folder)}/"] = b""
    return found


def unit_of(files: Mapping[str, bytes], unit: str) -> Files:
    """What of it belongs to a unit: a file, or a folder's content."""
    return {name: data for name, data in files.items() if name == unit or name.startswith(f"{unit}/")}


def _comparable(name: str, data: bytes) -> bytes:
    """A recipe's report and state without times, the command and the folder's own path; all else as it is."""
    if name not in ("report.json", "state.json"):
        return data
    try:
        value: Any = json.loads(data)
        for key in ("work", "artifact", "written", "sha256", "ended", "command"):
            value.pop(key, None)
        stages = value["stages"]
        for stage in stages.values() if isinstance(stages, dict) else stages:
            for key in ("seconds", "processor_seconds", "status"):
                stage.pop(key, None)
            for output in stage.get("outputs", {}).values():
                del output["mtime_ns"]
    except (ValueError, KeyError, TypeError, AttributeError):
        return data  # that of an unfinished run, or not whole
    return json.dumps(value, sort_keys=True).encode()
