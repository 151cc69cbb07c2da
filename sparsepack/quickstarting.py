"""From a model's name to a packed model: the recipe `quickstart` with what suits model and machine.

What is chosen, and why, stands in `RULES`. Nothing heavy is imported at the top: the command line reads the options.
"""

from __future__ import annotations

import json
import math
import re
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparsepack.errors import PackingError
from sparsepack.formats.table import FORMATS
from sparsepack.option import check_type, check_types, option
from sparsepack.packing import PackRequest
from sparsepack.progress import duration, format_count, say
from sparsepack.runtime.options import usual_context

if TYPE_CHECKING:
    from sparsepack.models.checkpoint.checkpoint import Checkpoint

RECIPE = Path("quickstart")
"""The ready-made recipe that is run."""


@dataclass(frozen=True)
class QuickstartOptions:
    """Options besides the model."""

    text: tuple[str, ...] = option(
        "Calibrate on this text, and score on a part of it that is held out (default: text that the model writes "
        "itself).",
        default=(),
    )
    device: str = option(
        "Where it runs: cpu, cuda, cuda:1, mps; auto: an NVIDIA GPU that has room for the file, else the CPU.",
        default="auto",
    )


@dataclass(frozen=True)
class Rule:
    """A format, and the models and machines for which it is the best that was measured (benchmarks/RESULTS.md).

    bits   -- of a weight that a token reads; None: all of them
    devices -- torch's types
    below  -- models of fewer weights
    passes -- what each window of the calibration text takes, as so many passes of it through the blocks: writing it,
              calibration, thresholds, error feedback, scoring
    fixed  -- what the rest takes, as so many passes of a window: loading, encoding, timing
    why    -- a clause for people
    """

    format: str
    bits: float | None
    devices: tuple[str, ...]
    below: float
    passes: float
    fixed: float
    why: str

    def seconds(self, windows: int, of_pass: float) -> float:
        """Return the seconds that all of it takes, where a window passes through the blocks in `of_pass`."""
        return of_pass * (self.passes * windows + self.fixed)


RULES = (
    Rule(
        "zigzag-q6_p",
        4.5,
        ("cpu", "cuda"),
        5e8,
        12,
        38,
        "a model this small loses a quarter of what it loses as zigzag-q4_k, or less",
    ),
    Rule(
        "zigzag-q4_k", None, ("cpu",), math.inf, 8, 34, "the fastest that was measured on CPUs, and the smallest file"
    ),
    Rule(
        "zigzag-q4_k",
        None,
        ("cuda", "mps"),
        math.inf,
        10,
        45,
        "the fastest that was measured on GPUs",
    ),
)
"""The first that fits model, memory and `SECONDS` is taken. Nothing is skipped: below a billion weights that gains no
speed, and what it costs larger models has not been measured."""

SECONDS = 300.0
"""Everything may take about so long."""
RATES: Mapping[str, float] = {"cpu": 3.2e10, "mps": 5e11, "cuda": 2e13}
"""Weights times tokens a second: of a core, and of the kinds of GPUs. What is chosen follows from these, so that it is
the same whenever it is chosen; how long it takes is measured on the machine."""
WINDOW, FEWEST_WINDOWS, HELD_OUT_SHARE = 512, 6, 4
MOST_WINDOWS: Mapping[str, int] = {"cpu": 12, "mps": 12, "cuda": 32}
"""Tokens of a calibration window; how many windows there are, one of `HELD_OUT_SHARE` of them held out."""


@dataclass(frozen=True)
class Size:
    """Weights of a model: all of them, and those of the blocks that a token has to do with."""

    weights: int
    of_token: int


@dataclass(frozen=True)
class Machine:
    """Cores that this process may use, and free memory by kind of device in bytes, None where nobody knows it."""

    cores: int
    free: Mapping[str, int | None]


@dataclass(frozen=True)
class Choice:
    """The format, device and calibration chosen for a model on a machine.

    windows -- of calibration text, those held out included; 0: weights are rounded to nearest without any
    reasons -- lines for people
    largest -- weights of the largest model that fits the free memory; None where nobody knows it
    largest_calibrated -- and of the largest one that is calibrated within `SECONDS`
    """

    rule: Rule
    device: str
    windows: int
    reasons: tuple[str, ...]
    largest: float | None
    largest_calibrated: float


def this_machine() -> Machine:
    """Return the machine that this process runs on."""
    import torch

    from sparsepack.runtime.cpu.machine import usable_cores
    from sparsepack.runtime.free_memory import free_bytes

    kinds = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    return Machine(usable_cores(), {kind: free_bytes(torch.device(kind)) for kind in kinds})


def choose(size: Size, options: QuickstartOptions, machine: Machine) -> Choice:
    """Return what suits a model on a machine. Raises `PackingError` where no memory has room for it."""
    fewest_bits = min(FORMATS[rule.format].bits for rule in RULES)
    smallest = fewest_bits * size.weights / 8
    device, reasons = options.device, list[str]()
    if device == "auto":
        device = "cuda" if (machine.free.get("cuda") or 0) > smallest else "cpu"
        if device == "cpu" and "cuda" in machine.free:
            reasons.append("not on the GPU: the file does not fit its free memory")
    kind = device.partition(":")[0]
    free = machine.free.get(kind)
    if free is not None and smallest > free:
        raise PackingError(
            f"{size.weights / 1e9:.1f} billion weights take {smallest / 1e9:.1f} GB packed, and {free / 1e9:.1f} GB of "
            f"memory are free on {device}; expected a smaller model; pack it for another machine by `sparsepack pack`"
        )
    of_pass = WINDOW * size.of_token / (RATES[kind] * (machine.cores if kind == "cpu" else 1))
    most = MOST_WINDOWS[kind]
    rules = [rule for rule in RULES if kind in rule.devices and size.weights < rule.below]
    for rule in rules:
        windows = min(most, max(0, int((SECONDS / of_pass - rule.fixed) / rule.passes)))
        if rule is rules[-1]:
            break
        if free is not None and FORMATS[rule.format].bits * size.weights / 8 > free:
            reasons.append(f"not {_in_words(rule)}: its file does not fit the free memory")
        elif windows < most:
            reasons.append(f"not {_in_words(rule)}: it takes about {duration(rule.seconds(most, of_pass))} here")
        else:
            break
    if windows < FEWEST_WINDOWS and options.text:
        windows = FEWEST_WINDOWS
    elif windows < FEWEST_WINDOWS:
        needed = duration(rule.seconds(FEWEST_WINDOWS, of_pass))
        reasons.append(f"weights are rounded to nearest: calibration takes about {needed} here; --text FILE demands it")
        windows = 0
    reasons = [f"{_in_words(rule)}: {rule.why}", *reasons]
    largest = None if free is None else 8 * free / fewest_bits
    calibrated = size.of_token * SECONDS / rules[-1].seconds(FEWEST_WINDOWS, of_pass)
    return Choice(rule, device, windows, tuple(reasons), largest, calibrated)


def _in_words(rule: Rule) -> str:
    return f"{rule.format}, {f'{rule.bits:g} bits read' if rule.bits else 'nothing skipped'}"


def overrides_of(name: str, model: str, choice: Choice, text: Sequence[str], context: int) -> list[str]:
    """Return the settings of the recipe that differ from those in its file, as `run --set` takes them."""
    held_out = choice.windows // HELD_OUT_SHARE
    format, bits = FORMATS[choice.rule.format], choice.rule.bits
    calibrate = {"text": list(text), "context": context, "samples": choice.windows - held_out, "held_out": held_out}
    values: dict[str, Any] = {
        "name": name,
        "description": "what sparsepack quickstart chose",
        "model": model,
        "device": choice.device,
        "dtype": "auto",
        "calibrate": calibrate if choice.windows else None,
        "activation_sparsity": {"sparsity": 1 - bits / format.bits} if bits and choice.windows else None,
        "pack": {"format": format.name},
        "verify": False,
        "eval": None,
        "generate": None,
    }
    return [f"{key}={json.dumps(value)}" for key, value in values.items()]


@dataclass(frozen=True)
class Quickstart:
    """What came of it.

    text    -- the names of what was calibrated on; empty: what the model wrote itself
    chats   -- whether the model has a chat template
    context, memory -- the tokens that an engine makes room for, and the bytes of the file, keys and values then
    report  -- of the recipe, JSON-able; `report.json` in the same folder has it, too
    """

    path: Path
    choice: Choice
    text: str
    chats: bool
    context: int
    memory: int
    report: dict[str, Any]


def quickstart(model: str, output: Path | None = None, options: QuickstartOptions | None = None) -> Quickstart:
    """Calibrate, pack, score and time a model in the folder `output` (default: `work/NAME`) by what suits this machine.

    What was finished there is not done again. Raises `UserError` subclasses.
    """
    check_type("model", model, str, PackingError)
    check_type("output", output, Path | None, PackingError)
    options = options or QuickstartOptions()
    check_types(options, PackingError)
    from sparsepack.files.atomic import write_json
    from sparsepack.files.hashing import fingerprint
    from sparsepack.files.side_files import check_no_link
    from sparsepack.models.checkpoint.checkpoint import open_checkpoint
    from sparsepack.models.hf_model.forecast import model_parameters, seconds_of_pass
    from sparsepack.recipe.load import load_recipe
    from sparsepack.recipe.report import REPORT
    from sparsepack.recipe.run import DEFAULT_WORK, Outcome, open_work, run_recipe, stages_of
    from sparsepack.recipe.stage import Job
    from sparsepack.runtime.free_memory import cache_bytes
    from sparsepack.version import __version__

    began, processor_began = time.perf_counter(), time.process_time()
    checkpoint = open_checkpoint(model)
    of_token = sum(checkpoint.token_weights(site, layer) for layer, site in checkpoint.sites)
    size = Size(model_parameters(checkpoint), of_token)
    choice = choose(size, options, this_machine())
    FORMATS[choice.rule.format].check_model(checkpoint)
    name = re.sub(r"[^\w.-]", "-", Path(model.rpartition(":")[2]).name.removesuffix(".gguf"))
    folder = output or DEFAULT_WORK / name
    for each in () if output else (DEFAULT_WORK, folder):  # nobody named it: a stranger's may hold a link of its name
        check_no_link(each)
    say(f"{name}: {size.weights / 1e6:,.0f} million weights", *choice.reasons)
    predicted = choice.rule.seconds(choice.windows, seconds_of_pass(checkpoint, choice.device, WINDOW, of_token))
    say(f"this takes about {duration(predicted)}; a run that is stopped goes on when it is started again")
    context = min(WINDOW, int(checkpoint.config.max_position_embeddings))
    shapes = {name: list(shape) for name, shape in checkpoint.source.shapes.items()}
    own = folder / f"text-{fingerprint([__version__, shapes, context, choice.windows])[:12]}.jsonl"
    overrides = overrides_of(name, model, choice, options.text or (str(own),), context)
    recipe = load_recipe(RECIPE, overrides)
    open_work(Job(recipe, checkpoint, folder), stages_of(recipe), RECIPE.name + ".yaml").create()
    text = None
    if choice.windows and not options.text and not own.is_file():
        start, processor = time.perf_counter(), time.process_time()
        _write_text(checkpoint, own, choice.windows * context, choice.device)
        text = Outcome("writing text", "ran", time.perf_counter() - start, time.process_time() - processor)
    report = run_recipe(RECIPE, overrides, folder, show=False).report
    report["quickstart"] = {
        "predicted_seconds": predicted,
        "seconds": time.perf_counter() - began,
        "processor_seconds": time.process_time() - processor_began,
        "text": text and asdict(text),
    }
    write_json(folder / REPORT, report)
    room = usual_context(int(checkpoint.config.max_position_embeddings))
    keys_and_values = cache_bytes(checkpoint.architecture, room, report["bench"]["tests"][0]["type_k"])
    memory = report["pack"]["file_bytes"] + keys_and_values
    chats = bool(checkpoint.chat_templates)
    return Quickstart(Path(report["artifact"]), choice, ", ".join(options.text), chats, room, memory, report)


def _write_text(checkpoint: Checkpoint, output: Path, tokens: int, device: str) -> None:
    """Let the model write so many tokens of calibration text; its weights are rounded to Q4_K for that."""
    from sparsepack.calibrate.own_text import write_own_text
    from sparsepack.loading import load
    from sparsepack.packing import pack

    writer = output.with_name("writer.gguf")
    pack(PackRequest(checkpoint.name, writer, score=False, device=device, overwrite=True), checkpoint)
    write_own_text(load(writer, device, sequences=None), output, tokens)
    writer.unlink()


def quickstart_table(result: Quickstart) -> str:
    """Return what came of it, a line each, and the commands that come next."""
    from sparsepack.recipe.model_stages import CALIBRATION

    report, file = result.report, shlex.quote(str(result.path))
    packed, model = report["pack"], report["recipe"]["model"]
    text = f"text of {result.text}" if result.text else "text that the model wrote itself"
    bits = f"{packed['bits_per_weight']['blocks']:.2f} bits a weight of the blocks"
    rows = {
        "file": f"{result.path}: {packed['file_bytes'] / 1e6:,.0f} MB, {bits}",
        "memory": f"{result.memory / 1e6:,.0f} MB with keys and values of {result.context:,} tokens",
        "lost": _lost(packed.get("score"), text),
        "speed": _speed(report["bench"]["tests"]),
        "time": _time(report),
        "talk": f"sparsepack generate {file} {'--chat' if result.chats else '--prompt TEXT'}",
        "serve": f"sparsepack serve {file}",
    }
    calibration = shlex.quote(str(result.path.with_name(CALIBRATION)))
    if result.choice.windows and not result.choice.rule.bits and result.choice.device == "cpu":
        target = shlex.quote(str(result.path.with_name("planes.gguf")))
        options = "--format zigzag-q6_p --bits 4.5"
        rows["lose less"] = f"sparsepack pack {shlex.quote(model)} --calibration {calibration} {options} -o {target}"
    if not result.text:
        rows["own text"] = f"sparsepack quickstart {shlex.quote(model)} --text FILE -o FOLDER"
    if result.choice.largest is not None:
        calibrated = min(result.choice.largest, result.choice.largest_calibrated)
        rows["larger"] = (
            f"models of up to {result.choice.largest / 1e9:.1f} billion weights fit the free memory; up to "
            f"{calibrated / 1e9:.1f} billion are calibrated in {duration(SECONDS)}, larger ones only rounded"
        )
    return "\n".join(f"{name.ljust(10)}{value}" for name, value in rows.items())


def _lost(score: Mapping[str, Any] | None, text: str) -> str:
    from sparsepack.eval.results import with_error

    found = score and (score.get("decode") or score["dense"])
    if score is None or found is None:
        return "not measured: no text is held out"
    risen = {key: value and 100 * (value - (key == "value")) for key, value in found["perplexity_ratio"].items()}
    return (
        f"perplexity rises by {with_error(risen, 1)} %, the likeliest next token stays the same for "
        f"{100 * found['top_token_agreement']['value']:.1f} %, KL divergence {with_error(found['kl_divergence'], 4)} "
        f"nats a token, on {format_count(score['windows'], 'window')} of {score['context']:,} tokens held out of {text}"
    )


def _time(report: Mapping[str, Any]) -> str:
    took = report["quickstart"]
    steps = [step for step in (took["text"], *report["stages"]) if step and step["status"] == "ran"]
    said = [f"{duration(took['seconds'])}, {took['processor_seconds']:.0f} s of processor"]
    return "; ".join(said + [f"{step['name']} {step['seconds']:.0f} s" for step in steps])


def _speed(tests: Sequence[Mapping[str, Any]]) -> str:
    prompt = next(row for row in tests if row["n_prompt"])
    writing = {row["mode"]: row for row in tests if not row["n_prompt"]}
    dense = writing["dense"]["median_ts"]
    said = f"{dense:,.0f} tokens/s writing"
    if "sparse" in writing:
        speed, bits = writing["sparse"]["median_ts"], writing["sparse"]["bits_read"]
        times = f"{speed / dense:.2f} times as fast as reading all bits ({dense:,.0f})"
        said = f"{speed:,.0f} tokens/s writing at {bits:.1f} bits read, {times}"
    return f"{said}; {prompt['median_ts']:,.0f} reading a prompt of {prompt['n_prompt']}"
