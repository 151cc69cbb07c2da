"""What packing an FP8 release takes: CPU time, memory, and bytes read of its files, by format and number of blocks.

The release is random, of the widths of Qwen3-1.7B, with a scale for each block of 128 x 128, in files of four blocks.
Each is packed in a process of its own, whose counts begin when a tiny model has been packed there; the system drops the
files from its cache before, as far as it follows advice.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import click
import torch
from safetensors.torch import save_file

from benchmarks.shared.checkpoints import DEFAULT_WORK
from benchmarks.shared.timing import json_option, write_figures
from sparsepack.data import SHIPPED_MODELS

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 2048, 6144, 16, 8, 128, 4096
BLOCK, BLOCKS_A_FILE = 128, 4
MATRICES = {
    "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
    "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
    "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
    "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
    "mlp.up_proj": (INTERMEDIATE, HIDDEN),
    "mlp.down_proj": (HIDDEN, INTERMEDIATE),
}
NORMS = {"input_layernorm": HIDDEN, "post_attention_layernorm": HIDDEN}
NORMS |= {"self_attn.q_norm": HEAD_DIM, "self_attn.k_norm": HEAD_DIM}
MEASURED = """
import json, os, resource, sys, time
from pathlib import Path
from sparsepack.packing import PackRequest, pack
model, output, format = sys.argv[1:]
pack(PackRequest("shipped:tiny", Path(output), format=format))
os.remove(output)
def now():
    io = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    cpu = sum(each.ru_utime + each.ru_stime for each in used)
    return time.perf_counter(), cpu, int(io["rchar"]), int(io["read_bytes"])
before = now()
pack(PackRequest(model, Path(output), format=format))
memory = [resource.getrusage(who).ru_maxrss >> 10 for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
print(json.dumps([*(b - a for a, b in zip(before, now())), *memory]))
"""


def make_release(folder: Path, blocks: int) -> None:
    """A random FP8 release of so many blocks, made again only where there is none."""
    if (folder / "model.safetensors.index.json").is_file():
        return
    folder.mkdir(parents=True, exist_ok=True)
    bits = torch.Generator().manual_seed(0)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(SHIPPED_MODELS["shipped:tiny"] / name, folder)
    normal = torch.randn(VOCABULARY, HIDDEN, generator=bits)
    tensors = {"model.embed_tokens.weight": normal.mul_(0.02).bfloat16(), "model.norm.weight": torch.ones(HIDDEN)}
    index: dict[str, str] = {}
    for layer in range(blocks):
        begin = f"model.layers.{layer}."
        for name, (rows, columns) in MATRICES.items():
            weight = torch.randn(rows, columns, generator=bits).mul_(0.02).view(rows // BLOCK, BLOCK, -1, BLOCK)
            scale = weight.abs().amax((1, 3)) / 448
            codes = (weight / scale[:, None, :, None]).view(rows, columns).to(torch.float8_e4m3fn)
            tensors |= {f"{begin}{name}.weight": codes, f"{begin}{name}.weight_scale_inv": scale}
        tensors |= {f"{begin}{name}.weight": torch.ones(width) for name, width in NORMS.items()}
        if layer % BLOCKS_A_FILE == BLOCKS_A_FILE - 1 or layer == blocks - 1:
            name = f"model-{layer // BLOCKS_A_FILE + 1:05}.safetensors"
            save_file(tensors, folder / name)
            index |= dict.fromkeys(tensors, name)
            tensors = {}
    config = {
        **{"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": HIDDEN},
        **{"intermediate_size": INTERMEDIATE, "num_hidden_layers": blocks, "num_attention_heads": HEADS},
        **{"num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "vocab_size": VOCABULARY},
        **{"max_position_embeddings": 4096, "tie_word_embeddings": True, "torch_dtype": "bfloat16"},
        "quantization_config": {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
        },
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def forget(folder: Path) -> int:
    """Advise the system to drop the files of a release from its cache; returns their bytes."""
    size = 0
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        size += path.stat().st_size
    return size


@click.command()
@click.option("--blocks", type=int, multiple=True, default=(10, 28), show_default=True)
@click.option("--format", "formats", multiple=True, default=("zigzag-q4_k", "zigzag-q6_p"), show_default=True)
@click.option("--source", type=click.Path(path_type=Path), help="Another checkout of sparsepack, to be measured.")
@click.option("--work", type=click.Path(path_type=Path), default=DEFAULT_WORK, show_default=True)
@json_option
def main(
    blocks: tuple[int, ...], formats: tuple[str, ...], source: Path | None, work: Path, json_path: Path | None
) -> None:
    """Pack random FP8 releases and print what that takes."""
    figures = []
    for count in blocks:
        folder = work / f"fp8-{count}"
        make_release(folder, count)
        for format in formats:
            size, output = forget(folder), work / "packed.gguf"
            output.unlink(missing_ok=True)
            environment = os.environ | ({"PYTHONPATH": str(source)} if source else {})
            command = [sys.executable, "-c", MEASURED, str(folder), str(output), format]
            ended = subprocess.run(command, env=environment, cwd=work, capture_output=True, text=True, check=False)
            if ended.returncode:
                raise click.ClickException(ended.stderr)
            seconds, cpu, called, read, own, of_fork = load(ended.stdout)
            figures.append({"blocks": count, "format": format, "seconds": seconds, "cpu": cpu, "bytes": size})
            figures[-1] |= {"called": called, "read": read, "MiB": own, "MiB of a fork": of_fork}
            speed = f"{seconds:.1f} s, {cpu:.1f} CPU s, {size / 1e6 / cpu:.0f} MB a CPU second"
            reads = f"read {read / size:.2f} times from the disk, {called / size:.2f} by calls"
            click.echo(f"{format}, {count} blocks, {size / 1e6:,.0f} MB: {speed}; {reads}; {own} MiB, a fork {of_fork}")
    write_figures(json_path, figures)


def load(printed: str) -> list[float]:
    """The last line that was printed."""
    found: list[float] = json.loads(printed.strip().splitlines()[-1])
    return found
