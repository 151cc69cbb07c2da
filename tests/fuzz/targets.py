"""The readers, and what is made of a good input of each."""

import contextlib
import json
import os
import shutil
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator
from fractions import Fraction
from pathlib import Path
from random import Random
from typing import Any

import torch
import yaml

from sparsepack.calibrate import folder as calibration_folder
from sparsepack.calibrate import trace_file as traces
from sparsepack.calibrate.collect import CalibrateOptions
from sparsepack.calibrate.collection import calibrate
from sparsepack.calibrate.find_thresholds import find_thresholds
from sparsepack.calibrate.threshold_table import read_thresholds
from sparsepack.calibrate.thresholds import AllocationOptions
from sparsepack.calibrate.trace import TraceOptions
from sparsepack.calibrate.tracing import trace as make_trace
from sparsepack.errors import UserError
from sparsepack.files.hashing import sha256_file
from sparsepack.files.text import Text
from sparsepack.formats.attention import attention_section
from sparsepack.formats.open import open_artifact, read_packed
from sparsepack.formats.verify import verify
from sparsepack.loading import load
from sparsepack.models.checkpoint.checkpoint import Checkpoint, open_checkpoint
from sparsepack.models.checkpoint.writer import config_json, tokenizer_config
from sparsepack.models.hf_config import heads_of_config
from sparsepack.models.sites import SiteRule
from sparsepack.models.sparse_attention import SparseAttention, TokenPolicy
from sparsepack.recipe.load import FOLDER, load_recipe
from sparsepack.runtime.options import GenerateOptions
from tests.artifacts_for_tests import plan_neurons, write_plain, write_zigzag
from tests.fuzz import sealed_gguf
from tests.fuzz.bodies import requests_target
from tests.fuzz.harness import Broken, Target, command
from tests.fuzz.mutate import bytes_changed, json_changed
from tests.models_for_tests import TEXT, make_model
from tests.releases_for_tests import RELEASES, release
from tests.segments_for_tests import segmented

TARGETS = ("artifact", "resealed", "checkpoint", "calibration", "trace", "thresholds", "recipe", "requests")
_RELEASES = (
    "fp8, blocks",
    "modelopt nvfp4",
    "compressed int4, zero points, ordered",
    "gptq, 3 bits, version 1, shuffled",
    "awq",
    "nf4, nested",
)
_SMALL = {"num_hidden_layers": 1, "intermediate_size": 256, "num_attention_heads": 4, "max_position_embeddings": 64}


def make_targets(folder: Path, names: Iterable[str] = TARGETS) -> Iterator[Target]:
    """The targets of those names; `folder` holds the good inputs that they are made from."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    torch.set_num_threads(1)  # of models this small
    model = make_model(folder / "model", "llama", **_SMALL)
    makers: dict[str, Callable[[Path, Path], Target]] = {
        "artifact": _artifact,
        "resealed": _resealed,
        "checkpoint": _checkpoint,
        "calibration": _calibration,
        "trace": _trace,
        "thresholds": _thresholds,
        "recipe": _recipe,
        "requests": _requests,
    }
    return (makers[name](model, _made(folder / name)) for name in names)


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def _files(model: Path, folder: Path) -> list[Path]:
    """An artifact of each kind."""
    checkpoint = open_checkpoint(model)
    ramp = torch.arange(256) / 256
    rules = {(0, "attn_in"): SiteRule(torch.tensor(0.25)), (0, "mlp_mid"): SiteRule(ramp, -ramp)}
    provenance = {"thresholds": None, "calibration": {"sha256": "0" * 64}, "recipe": None}
    table = _table(model, folder)
    write_zigzag(checkpoint, rules, folder / "zigzag.gguf", provenance={**provenance, "thresholds": table.summary()})
    write_zigzag(checkpoint, {}, folder / "attention.gguf", attention=_attention(checkpoint))
    plan_neurons(open_checkpoint(_relu(model, folder / "relu"))).write(folder / "neuron.gguf")
    tails = make_model(folder / "widths", "llama", **{**_SMALL, "intermediate_size": 70})  # three pieces a column
    write_zigzag(open_checkpoint(tails), {}, folder / "tails.gguf")
    write_zigzag(segmented(model, (0,), folder / "segments"), {}, folder / "segments.gguf")
    write_plain(checkpoint, folder / "plain.gguf")
    write_plain(checkpoint, folder / "f16.gguf", "f16")
    names = ("zigzag", "zigzag", "attention", "tails", "neuron", "segments", "plain", "f16")
    return [folder / f"{name}.gguf" for name in names]


def _relu(model: Path, folder: Path) -> Path:
    """The same model with another activation."""
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "hidden_act": "relu"}))
    return folder


def _attention(checkpoint: Checkpoint) -> dict[str, Any]:
    """So that a few tokens are enough for it."""
    heads = heads_of_config(checkpoint.config)
    channels = torch.arange(4).expand(heads.kv_heads, -1)
    policy = TokenPolicy(Fraction(1, 2), sinks=1, recent=1, min_context=2)
    return attention_section(SparseAttention(policy, (channels,) * checkpoint.layers), heads, "0" * 64)


def _artifact(model: Path, folder: Path) -> Target:
    good = [(path.stem, path.read_bytes()) for path in _files(model, folder)]

    def write(random: Random, into: Path) -> None:
        name, data = random.choice(good)
        (into / f"{name}.gguf").write_bytes(bytes_changed(random, data))

    def read(inside: Path) -> None:
        path = next(inside.glob("*.gguf"))
        command("inspect", path)
        same = path.read_bytes() == dict(good)[path.stem]
        if verify(path).passed and not same:
            raise Broken("it was changed, and verify passes it")
        read_packed(path)
        if not same:
            raise Broken("it was changed, and opens as what an engine runs")

    return Target("artifact", write, read)


def _resealed(model: Path, folder: Path) -> Target:
    good = [(path.stem, sealed_gguf.read(path.read_bytes())) for path in _files(model, folder)]

    def write(random: Random, into: Path) -> None:
        name, gguf = random.choice(good)
        sealed_gguf.changed(random, gguf).write(into / f"{name}.gguf")

    def read(inside: Path) -> None:
        path = next(inside.glob("*.gguf"))
        for use in (_inspected, _verified, _carded, _stock, _run_natively, _run_in_torch, _as_source):
            try:
                use(path)
            except UserError:  # the next one may take another way
                continue

    return Target("resealed", write, read)


def _inspected(path: Path) -> None:
    command("inspect", path)


def _carded(path: Path) -> None:
    command("card", path)


def _verified(path: Path) -> None:
    command("verify", path)


def _stock(path: Path) -> None:
    stock = open_artifact(path).stock()
    stock.tokenizer.encode("The class")
    assert stock.family


def _run_natively(path: Path) -> None:
    load(path, threads=1).generate("The class", GenerateOptions(tokens=3)).result()


def _run_in_torch(path: Path) -> None:
    load(path, threads=1, backend="reference").generate("The class", GenerateOptions(tokens=2)).result()


def _as_source(path: Path) -> None:
    checkpoint = open_checkpoint(path)
    assert checkpoint.architecture
    for name in checkpoint.source.shapes:
        if name.startswith("model.layers.0."):
            checkpoint.tensor(name)


def _checkpoint(model: Path, folder: Path) -> Target:
    write_plain(open_checkpoint(model), folder / "source.gguf", "f16")
    source = (folder / "source.gguf").read_bytes()
    index = {"metadata": {"total_size": 1}, "weight_map": {"model.norm.weight": "model.safetensors"}}
    text = folder / "text.txt"
    text.write_text(TEXT[:3000])
    changed = segmented(model, (0,), folder / "segments").path
    releases = []
    for number, kind in enumerate(_RELEASES):
        releases.append(Path(shutil.copytree(model, folder / f"release-{number}")))
        release(releases[-1], RELEASES[kind])

    def write(random: Random, into: Path) -> None:
        (into / "how").write_text(random.choice(("read", "read", "read", "pack", "calibrate")))
        if random.random() < 0.2:
            (into / "m.gguf").write_bytes(bytes_changed(random, source))
            return
        shutil.copytree(random.choice((model, model, changed, random.choice(releases))), into / "m")
        if random.random() < 0.2:
            (into / "m" / "model.safetensors.index.json").write_text(json_changed(random, json.dumps(index)))
            return
        names = ["config.json"] * 4 + sorted(path.name for path in model.iterdir())
        path = into / "m" / random.choice(names)
        if not path.is_file():
            return
        if path.suffix == ".json":
            path.write_bytes(json_changed(random, path.read_text()).encode("utf-8", "surrogatepass"))
        elif random.random() < 0.5:
            path.write_bytes(_header_changed(random, path.read_bytes()))
        else:
            path.write_bytes(bytes_changed(random, path.read_bytes()))

    def read(inside: Path) -> None:
        path = inside / "m" if (inside / "m").is_dir() else inside / "m.gguf"
        how = (inside / "how").read_text()
        if how == "pack":
            command("pack", path, "-o", inside / "out.gguf")
        elif how == "calibrate":
            command("calibrate", path, "--text", text, "-o", inside / "cal", "--context", 16, "--samples", 1)
        checkpoint = open_checkpoint(path)
        assert checkpoint.sha256
        config_json(checkpoint)
        tokenizer_config(checkpoint)
        checkpoint.tokenizer_json()
        assert checkpoint.architecture
        for name in checkpoint.source.shapes:
            if name.startswith("model.layers.0."):
                checkpoint.tensor(name)

    return Target("checkpoint", write, read)


def _header_changed(random: Random, data: bytes) -> bytes:
    """A safetensors file whose header says something else."""
    length = int.from_bytes(data[:8], "little")
    header = json_changed(random, data[8 : 8 + length].decode()).encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(header)) + header + data[8 + length :]


def _calibrated(model: Path, folder: Path) -> Path:
    path = folder / "calibration"
    if not path.exists():
        options = CalibrateOptions(context=16, samples=2)
        calibrate(open_checkpoint(model), Text("topics", (TEXT[:2000],), "topics"), path, options)
    return path


def _calibration(model: Path, folder: Path) -> Target:
    good = _calibrated(model, folder)
    checkpoint, whole = open_checkpoint(model), calibration_folder.load(good)

    def write(random: Random, into: Path) -> None:
        manifest, tensors = into / "c" / "calibration.json", into / "c" / "calibration.safetensors"
        shutil.copytree(good, into / "c")
        if random.random() < 0.4:
            change = random.choice((bytes_changed, _header_changed))
            tensors.write_bytes(change(random, tensors.read_bytes()))
            value = json.loads(manifest.read_text())
            manifest.write_text(json.dumps({**value, "statistics_sha256": sha256_file(tensors)}))
        if random.random() < 0.7:
            changed = json_changed(random, manifest.read_text())
            manifest.write_bytes(changed.encode("utf-8", "surrogatepass"))

    def read(inside: Path) -> None:
        path = inside / "c"
        command("inspect", path)
        options = ("--calibration", path, "--sparsity", 0.5, "--dense-upstream", "-o", inside / "t.json")
        command("thresholds", model, *options)
        found = calibration_folder.load(path)
        with contextlib.suppress(UserError):
            calibration_folder.merge(found, whole)
        found.check_model(checkpoint)

    return Target("calibration", write, read)


def _trace(model: Path, folder: Path) -> Target:
    calibration, good = _calibrated(model, folder), folder / "trace"
    text = Text("topics", (TEXT[:2000],), "topics")
    options = TraceOptions(sessions=2, tokens=16, prompt=4, share=0.4)
    whole = make_trace(open_checkpoint(model), text, good, options, calibration)
    files = sorted(whole.manifest["files"])

    def write(random: Random, into: Path) -> None:
        shutil.copytree(good, into / "t")
        manifest = into / "t" / traces.MANIFEST
        if random.random() < 0.4:
            name = random.choice(files)
            path = into / "t" / name
            data = path.read_bytes()
            rows = bytes_changed(random, zlib.decompress(data))
            path.write_bytes(random.choice((zlib.compress(rows), bytes_changed(random, data))))
            value = json.loads(manifest.read_text())
            value["files"][name] = sha256_file(path)
            manifest.write_text(json.dumps(value))
        if random.random() < 0.7:
            changed = json_changed(random, manifest.read_text())
            manifest.write_bytes(changed.encode("utf-8", "surrogatepass"))

    def read(inside: Path) -> None:
        path = inside / "t"
        command("inspect", path)
        command("simulate", path, "--calibration", good, "--cached", "0.3", "--policy", "static,slow,belady")
        traces.load(path)
        with contextlib.suppress(UserError):
            traces.merge_folders(path, good, inside / "m")

    return Target("trace", write, read)


def _table(model: Path, folder: Path):
    calibration = calibration_folder.load(_calibrated(model, folder))
    options = AllocationOptions(sparsity=0.5, allocation="uniform", criterion="column-norm", windows=2)
    return find_thresholds(open_checkpoint(model), calibration, options)


def _thresholds(model: Path, folder: Path) -> Target:
    _table(model, folder).write(folder / "t.json", overwrite=True)
    good, checkpoint = (folder / "t.json").read_text(), open_checkpoint(model)

    def write(random: Random, into: Path) -> None:
        changed = json_changed(random, good)
        (into / "t.json").write_bytes(changed.encode("utf-8", "surrogatepass"))

    def read(inside: Path) -> None:
        path = inside / "t.json"
        command("inspect", path)
        table = read_thresholds(path)
        table.check_model(checkpoint)
        command("pack", model, "--thresholds", path, "-o", inside / "m.gguf")
        if (inside / "m.gguf").exists():
            command("inspect", inside / "m.gguf")
            _run_natively(inside / "m.gguf")

    return Target("thresholds", write, read)


def _recipe(model: Path, folder: Path) -> Target:
    texts = [path.read_text() for path in sorted(FOLDER.glob("*.yaml")) if "workflow" not in path.name]
    (folder / "text.txt").write_text(TEXT[:5000])
    own = {"model": str(model), "calibrate": {"text": str(folder / "text.txt"), "context": 16, "samples": 1}}
    values = [json.dumps({**yaml.safe_load(text), **own}) for text in texts]

    def write(random: Random, into: Path) -> None:
        if random.random() < 0.4:
            changed = bytes_changed(random, random.choice(texts).encode())
        else:
            changed = json_changed(random, random.choice(values)).encode("utf-8", "surrogatepass")
        (into / "r.yaml").write_bytes(changed)
        (into / "set").write_text(
            random.choice(("", "", "eval=null", "model=", "gates.x=1", "a.b.c=[", "eval.windows=1"))
        )

    def read(inside: Path) -> None:
        overrides = list(filter(None, [(inside / "set").read_text()]))
        load_recipe(inside / "r.yaml", overrides)
        sets = [part for text in overrides for part in ("--set", text)]
        command("run", inside / "r.yaml", "--dry-run", "-w", inside / "work", *sets)

    return Target("recipe", write, read)


def _requests(model: Path, folder: Path) -> Target:
    with_room = make_model(folder / "model", "llama", **{**_SMALL, "max_position_embeddings": 512})
    return requests_target(with_room, folder)
