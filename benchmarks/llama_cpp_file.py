"""Random weights of a shape as a GGUF for llama.cpp, without a tokenizer; blocks have the same weights. And how fast
llama.cpp's own benchmark decodes with it on the GPU."""

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cuda_synthetic import random_rows, random_superblocks
from llama_cpp_offload import runner
from mixtures import SHARPER

from sparsepack.formats.codecs.types import type_that_fits
from sparsepack.formats.plain.llama_cpp.keys import architecture_keys
from sparsepack.models.architecture import architecture_of
from sparsepack.models.checkpoint.experts import part_shapes
from sparsepack.models.checkpoint.gguf_config import ROUTER, SHARED_GATE, UNQUANTISED, gguf_names
from sparsepack.models.families import FAMILIES
from sparsepack.models.stock.skeleton import parameter_shapes


def write_shape(path: Path, config: Any, device: str = "cpu") -> Path:
    """Write the model of a configuration, of any family that llama.cpp knows: matrices in Q4_K or what takes its place
    for their columns, routers and norms in F32, the matrix that gives logits in Q6_K. They are made on a device."""
    import gguf

    a, family = architecture_of(config, None), FAMILIES[config.model_type]
    shapes = parameter_shapes(config)
    shapes |= part_shapes(family, shapes)
    generator = torch.Generator(device=device).manual_seed(0)
    of_logits = "token_embd.weight" if a.tied else "output.weight"
    made: dict[str, tuple[np.ndarray, Any]] = {}

    def tensor(part: str, shape: tuple[int, ...]) -> tuple[np.ndarray, Any]:
        *rows, columns = shape
        if len(shape) < 2 or part in UNQUANTISED:
            size = SHARPER * columns**-0.5 if part.startswith(ROUTER) else 1.0
            ones = torch.ones(shape[-1:] if part.startswith(SHARED_GATE) else shape)
            random = torch.randn(ones.shape, generator=generator, device=generator.device).cpu()
            return (size * random if part.startswith(ROUTER) else ones * part.endswith(".weight")).numpy(), None
        type = type_that_fits("Q6_K" if part == of_logits else "Q4_K", columns)
        deviation = {"token_embd.weight": 1.0, of_logits: columns**-0.5}.get(part, 0.1 * columns**-0.5)
        if type == "Q4_K":
            blocks = random_superblocks((*rows, columns // 256), deviation, generator).flatten(-2)
        else:
            blocks = random_rows(math.prod(rows), columns, deviation, generator, type).blocks
        return blocks.reshape(*rows, -1).cpu().numpy(), gguf.GGMLQuantizationType[type]

    unfinished = path.with_suffix(".unfinished")
    writer = gguf.GGUFWriter(unfinished, family.gguf)
    for name, (value, type, sub_type) in architecture_keys(a, config)[0].items():
        writer.add_key_value(name, value, type, sub_type)
    writer.add_tokenizer_model("no_vocab")
    for name, source in gguf_names(family, a.layers).items():
        if source not in shapes:
            continue
        part = name.split(".", 2)[-1] if name.startswith("blk.") else name
        if part not in made:
            made[part] = tensor(part, shapes[source])
        weights, type = made[part]
        writer.add_tensor(name, weights, raw_dtype=type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return unfinished.rename(path)


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
