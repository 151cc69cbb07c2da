"""llama.cpp's own benchmarks as peers, with random weights of a shape as a GGUF; and the best that its partial offload
reaches within a budget of the GPU's memory, by its own report of it.

Layers (`-ngl N`: the last N of them on the GPU) and MLPs (the attention of all on the GPU, the MLPs of the first K on
the processor: `--n-cpu-ffn K` where llama-bench has it, else by `-ot`) are swept: of each kind the largest share that
stays within the budget is timed. Counted against the budget are the buffers that llama-bench -v reports for the GPU:
weights, keys and values, and what computing takes, not the driver's context.
"""

import json
import math
import re
import statistics
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.shared import gemma_4_gguf
from benchmarks.shared.random_models import random_rows, random_superblocks
from benchmarks.shared.shapes import SHARPER
from sparsepack.formats.blocks.table import type_that_fits
from sparsepack.formats.containers.gguf import KeyValue
from sparsepack.formats.llama_cpp.keys import architecture_keys
from sparsepack.models.architecture import Architecture
from sparsepack.models.checkpoint.experts import part_shapes
from sparsepack.models.checkpoint.gguf_config import ROUTER, UNQUANTISED, gguf_names
from sparsepack.models.checkpoint.llama_cpp_tensors import LlamaCppTensors
from sparsepack.models.families import FAMILIES
from sparsepack.models.hf_config import architecture_of
from sparsepack.models.hf_model.model import parameter_shapes

_BUFFER = re.compile(r"CUDA\d+(?: [A-Za-z]+)? (?:model |KV |compute |output )?buffer size *= *([\d.]+) MiB")
LAYERS, MLPS = "layers", "MLPs"
COMPUTING = 350_000_000
"""About as many bytes are on the GPU beside weights, before any report says it."""
Run = Callable[[Sequence[str]], tuple[str, str]]
"""The function runs llama-bench with arguments: what it wrote on standard output and on standard error."""


@dataclass(frozen=True)
class Split:
    """A way to divide the model. arguments -- of llama-bench; bytes -- on the GPU, by its report"""

    name: str
    arguments: tuple[str, ...]
    bytes: int


@dataclass(frozen=True)
class Peer:
    """llama-bench with a file. depth, new -- tokens before those that are timed, and these; threads of the processor;
    layer, mlp -- bytes of a layer and of an MLP; kinds of splits that are tried"""

    run: Run
    path: Path
    layers: int
    depth: int
    new: int
    threads: int
    layer: int
    mlp: int
    kinds: Sequence[str] = (LAYERS, MLPS)
    _reported: dict[str, int] = field(default_factory=dict)

    def command(self, split: Sequence[str], depth: int, new: int, rounds: int) -> list[str]:
        """The arguments of a run."""
        fixed = ["-m", self.path, "-o", "json", "-v", "-fa", 1, "-ctk", "f16", "-ctv", "f16", "-ub", 64]
        mapped = ["-lm", "none"] if "--load-mode" in self._help else ["-mmp", 0]
        sizes = ["-p", 0, "-n", new, "-d", depth, "-r", rounds, "-t", self.threads, *mapped]
        return [str(each) for each in (*fixed, *sizes, *split)]

    def within(self, budget: int, rounds: int) -> dict[Split, list[float]]:
        """Of each kind, the split with most on the GPU that stays within so many bytes, and its tokens a second in the
        rounds of the run that showed it."""
        found = {}
        for name in self.kinds:
            if largest := self._largest(name, budget, rounds):
                split, speeds = largest
                found[split] = speeds
        return found

    def tokens_per_second(self, split: Split, rounds: int) -> list[float]:
        """Of each round."""
        return self._timed(split.arguments, rounds)[0]

    def _timed(self, arguments: Sequence[str], rounds: int) -> tuple[list[float], int]:
        """Tokens a second of each round, and the bytes on the GPU."""
        written, said = self.run(self.command(arguments, self.depth, self.new, rounds))
        (row,) = json.loads(written)
        return [float(value) for value in row["samples_ts"]], reported_bytes(said)

    def _largest(self, name: str, budget: int, rounds: int) -> tuple[Split, list[float]] | None:
        """The largest of 0 .. layers whose report stays within the budget. As many as should fit are tried, then as
        many more or fewer as the report of these says: a load takes long, so each is timed at once."""
        of, each, beside = self._kinds[name]
        count = min(max((budget - self._reported.get(name, beside)) // each, 0), self.layers)
        found, too_many = None, self.layers + 1
        while True:
            speeds, size = self._timed(of(count), rounds)
            self._reported[name] = size - count * each
            if size <= budget:
                found = Split(f"{name} {count}/{self.layers}", of(count), size), speeds
                following = min(count + (budget - size) // each, too_many - 1)
            else:
                too_many = count
                following = max(count - max(1, -(-(size - budget) // each)), 0)
            if following == count or (found and following < count):
                return found
            count = following

    @property
    def _kinds(self) -> dict[str, tuple[Callable[[int], tuple[str, ...]], int, int]]:
        """Of each kind the arguments for a number of layers, the bytes of each, and about what else is on the GPU."""
        attention = self.layers * (self.layer - self.mlp)
        return {LAYERS: (_layers, self.layer, COMPUTING), MLPS: (self._mlps, self.mlp, attention + COMPUTING)}

    @cached_property
    def _help(self) -> str:
        """What this llama-bench says of its options, of which some came and others went in 2026."""
        return "".join(self.run(["--help"]))

    def _mlps(self, near: int) -> tuple[str, ...]:
        """All attention on the GPU, and the MLPs of the last `near` blocks."""
        far = self.layers - near
        if "--n-cpu-ffn" in self._help:
            return ("-ngl", "999", "--n-cpu-ffn", str(far))
        blocks = "|".join(map(str, range(far)))
        return ("-ngl", "999", "-ot", rf"blk\.({blocks})\.ffn_(gate|up|down)\.weight=CPU") if far else ("-ngl", "999")


def _layers(near: int) -> tuple[str, ...]:
    # One more than the blocks is the output matrix.
    return ("-ngl", str(near))


def reported_bytes(said: str) -> int:
    """What llama.cpp's log says that it has on the GPU. Raises `RuntimeError` where the log says nothing of buffers."""
    found = [float(size) for size in _BUFFER.findall(said)]
    if not found and "buffer size" not in said:
        raise RuntimeError(f"llama-bench -v reports no buffers; it said: {said[-500:]}")
    return round(sum(found) * 2**20)


def runner(program: Path) -> Run:
    """What runs a llama-bench. Raises `RuntimeError`, with the end of what it said, where it fails."""

    def run(arguments: Sequence[str]) -> tuple[str, str]:
        done = subprocess.run([str(program), *arguments], capture_output=True, text=True, errors="replace")
        if done.returncode and arguments != ["--help"]:
            raise RuntimeError(f"{program} {' '.join(arguments)}: {done.stderr[-1000:]}")
        return done.stdout, done.stderr

    return run


def write_shape(path: Path, config: Any, device: str = "cpu") -> Path:
    """Write the model of a configuration, of any family that llama.cpp knows: matrices in Q4_K or what takes its place
    for their columns, routers and norms in F32, the matrix that gives logits in Q6_K. They are made on a device."""
    import gguf

    a = architecture_of(config, None)
    kind, keys, shapes = _file_of(a, config)
    generator = torch.Generator(device=device).manual_seed(0)
    of_logits = "token_embd.weight" if a.tied else "output.weight"
    made: dict[tuple[str, tuple[int, ...]], tuple[np.ndarray, Any]] = {}

    def tensor(part: str, shape: tuple[int, ...]) -> tuple[np.ndarray, Any]:
        *rows, columns = shape
        if part in UNQUANTISED:
            size = (SHARPER if part.startswith(f"{ROUTER}.") else 1.0) * columns**-0.5
            return (size * torch.randn(shape, generator=generator, device=generator.device)).cpu().numpy(), None
        if len(shape) < 2 or not part.endswith(".weight"):  # weights of norms, biases, and what a state decays by
            ones = {"weight": 1.0, "scale": 1.0, "bias": 0.0}
            return np.full(shape, ones.get(part.rpartition(".")[2], -1.0), np.float32), None
        type = type_that_fits("Q6_K" if part == of_logits else "Q4_K", columns)
        deviation = {"token_embd.weight": 1.0, of_logits: columns**-0.5}.get(part, 0.1 * columns**-0.5)
        if type == "Q4_K":
            blocks = random_superblocks((*rows, columns // 256), deviation, generator).flatten(-2)
        else:
            blocks = random_rows(math.prod(rows), columns, deviation, generator, type).blocks
        return blocks.reshape(*rows, -1).cpu().numpy(), gguf.GGMLQuantizationType[type]

    unfinished = path.with_suffix(".unfinished")
    writer = gguf.GGUFWriter(unfinished, kind)
    for name, (value, type, sub_type) in keys.items():
        writer.add_key_value(name, value, type, sub_type)
    writer.add_tokenizer_model("no_vocab")
    for name, shape in shapes.items():
        part = name.split(".", 2)[-1] if name.startswith("blk.") else name
        key = part, shape
        if key not in made:
            made[key] = tensor(*key)
        weights, type = made[key]
        writer.add_tensor(name, weights, raw_dtype=type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return unfinished.rename(path)


def _file_of(a: Architecture, config: Any) -> tuple[str, Mapping[str, KeyValue], Mapping[str, tuple[int, ...]]]:
    """llama.cpp's name of a model, the keys of its file, and the shapes of the tensors by their names there."""
    family = FAMILIES[config.model_type]
    if config.model_type == "gemma4_text":
        return gemma_4_gguf.KIND, gemma_4_gguf.keys(a, config), gemma_4_gguf.shapes(a, config)
    layout, stock = LlamaCppTensors.of(family, config), parameter_shapes(config)
    both = {**stock, **part_shapes(family, stock)}
    shapes = {name: layout.shape_there(name, shape) for name, shape in both.items()}
    names = gguf_names(family, a.layers).items()
    of_names = {name: shapes[source] for name, source in names if source in shapes}
    assert family.gguf is not None  # the layout is llama.cpp's
    return family.gguf.name(a.experts is not None), architecture_keys(a, config)[0], of_names


@dataclass(frozen=True)
class PeerSpeeds:
    """llama.cpp's tokens a second, all on the GPU: decode -- in each round, after a prompt; prompts -- in the mean, by
    their lengths. Both are empty where it did not run."""

    decode: tuple[float, ...] = ()
    prompts: Mapping[int, float] = field(default_factory=dict)


def peer_speeds(
    program: Path, config: Any, folder: Path, prompt: int, new: int, prompts: Sequence[int], rounds: int
) -> PeerSpeeds:
    """The speeds of llama.cpp's own benchmark with such a file."""
    path = write_shape(folder / "peer.gguf", config, "cuda")
    lengths = ",".join(map(str, prompts))
    sizes = ["-p", lengths, "-n", str(new), "-d", f"0,{prompt}", "-r", str(rounds)]
    written, _ = runner(program)(["-m", str(path), "-o", "json", "-ngl", "99", "-fa", "1", *sizes])
    path.unlink()
    found = {(row["n_prompt"], row["n_gen"], row["n_depth"]): row["samples_ts"] for row in json.loads(written)}
    means = {length: statistics.mean(found[length, 0, 0]) for length in prompts}
    return PeerSpeeds(tuple(map(float, found[0, new, prompt])), means)


def peer_batches(
    program: Path, config: Any, folder: Path, prompt: int, new: int, texts: Sequence[int], device: str = "cuda"
) -> dict[int, float]:
    """llama.cpp's tokens a second of so many texts together, each of `new` tokens after a prompt, prompts not counted,
    by its llama-batched-bench with such a file."""
    path = write_shape(folder / "peer.gguf", config, device)
    room = str(max(texts) * (prompt + new))
    sizes = ["-c", room, "-npp", str(prompt), "-ntg", str(new), "-npl", ",".join(map(str, texts))]
    written, _ = runner(program)(["-m", str(path), *sizes, "-ngl", "99", "-fa", "on", "--output-format", "jsonl"])
    path.unlink()
    rows = [json.loads(line) for line in written.splitlines() if line.startswith("{")]
    return {row["pl"]: float(row["speed_tg"]) for row in rows}
