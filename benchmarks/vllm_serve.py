"""vLLM with slid weights beside vLLM with dense ones, on GPUs: a model of Qwen2.5-7B's shape, all weights random.

Each kind is served by a process of its own; all are started first, and then take turns, so that none is measured while
another one works. What was measured is written to --json after each turn. A process that says nothing for --patience
seconds is ended, and the end of its log tells where it stood. Nothing asks for a network.

INT8 and FP8 are what vLLM makes of checkpoints of compressed-tensors: a scale for each token and each row, CUTLASS's
products. Slid weights are served by the plug-in, as from a folder of `sparsepack pack`. What is timed is
`LLM.generate`: a prompt of 8,192 tokens and one more, and steps of 1, 64 and 256 sequences, many less one.
"""

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from benchmarks.shared.timing import json_option, write_figures

SHAPE = {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
}
LINEARS = (
    *(f"self_attn.{part}_proj" for part in ("q", "k", "v", "o")),
    *(f"mlp.{part}_proj" for part in ("gate", "up", "down")),
)
PROMPT = 8192
BATCHES = (1, 64, 256)
STEPS = 64
CACHE_BYTES = 2 << 30
WITHOUT_A_NETWORK = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",  # else vLLM asks which address leads outside, and torch for the name of that address
}
"""With these vLLM does not wait for answers that never come; docs/vllm.md says more."""
ROOT = Path(__file__).parents[1]
START = [sys.executable, "-m", "benchmarks", "vllm_serve"]
SAID = "vllm_serve: "
"""Answers of a serving process begin with this, among vLLM's log."""


def compressed_tensors(type: str) -> dict[str, Any]:
    """8-bit weights with a scale for each row, inputs with one for each token."""
    numbers = {"num_bits": 8, "type": type, "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": numbers | {"strategy": "channel", "dynamic": False},
        "input_activations": numbers | {"strategy": "token", "dynamic": True},
    }
    return {
        "quant_method": "compressed-tensors",
        "format": f"{type}-quantized",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }


def slid(format: str, keep: int, of: int) -> dict[str, Any]:
    """What `pack` writes about all Linears of a layer; the names of layers come later."""
    return {"quant_method": "sparsepack", "format": format, "patterns": {name: [keep, of] for name in LINEARS}}


KINDS: Mapping[str, dict[str, Any] | None] = {
    "BF16": None,
    "INT8": compressed_tensors("int"),
    "FP8": compressed_tensors("float"),
    "INT8, 6 of 8": slid("slide-int8", 6, 8),
    "FP8, 6 of 8": slid("slide-fp8", 6, 8),
    "INT8, 2 of 4": slid("slide-int8", 2, 4),
    "FP8, 2 of 4": slid("slide-fp8", 2, 4),
}
"""What `quantization_config` of config.json says."""


def write_config(folder: Path, kind: str, layers: int) -> None:
    """A config.json that vLLM serves with weights that are nowhere."""
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "num_hidden_layers": layers,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
        **SHAPE,
    }
    how = KINDS[kind]
    if how and "patterns" in how:
        named = {f"model.layers.{i}.{name}": pair for i in range(layers) for name, pair in how["patterns"].items()}
        how = how | {"patterns": named}
    if how:
        config["quantization_config"] = how
    (folder / "config.json").write_text(json.dumps(config))


def fill(layer: Any) -> None:
    """Random weights of a real spread in place of what a checkpoint would hold."""
    import torch

    pairs = torch.tensor([4, 8, 12, 9, 13, 14], dtype=torch.uint8)  # of positions that ascend
    done: set[int] = set()
    for name, parameter in layer.named_parameters():
        tensor = parameter.data
        if tensor.data_ptr() in done:
            continue
        done.add(tensor.data_ptr())
        if "norm" in name:
            tensor.fill_(1)
        elif "scale" in name:
            tensor.fill_(0.02 / 40)
        else:
            for part in tensor.split(4096):
                if part.dtype == torch.uint8:
                    some = pairs.to(part.device)
                    low, high = (some[torch.randint(0, 6, part.shape, device=part.device)] for _ in range(2))
                    part.copy_(low | high << 4)
                else:
                    spread = 40 if part.element_size() == 1 else 0.02
                    noise = torch.randn(part.shape, device=part.device) * spread
                    part.copy_(noise.round().clamp(-127, 127) if part.dtype == torch.int8 else noise)


def serve(kind: str, layers: int, ranks: int, compiled: bool) -> None:
    """Serve until nothing more is asked: how many texts, the tokens of their prompts and how many to write."""
    import torch
    import vllm.model_executor.model_loader.dummy_loader as dummy
    from vllm import LLM, SamplingParams

    def load_weights(self: Any, model: Any, config: Any) -> None:
        with torch.no_grad():
            fill(model)

    dummy.DummyModelLoader.load_weights = load_weights
    if "of" in kind:
        from sparsepack.integration.vllm.config import FolderVllmConfig
        from sparsepack.integration.vllm.plugin import register

        register()
        # There are no bytes to compare with hashes.
        FolderVllmConfig.maybe_update_config = lambda *_, **__: None  # type: ignore[method-assign]
    graphs: dict[str, Any] = {"cudagraph_capture_sizes": [*BATCHES]}
    if not compiled:
        graphs |= {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    with tempfile.TemporaryDirectory() as folder:
        write_config(Path(folder), kind, layers)
        begun = time.perf_counter()
        llm = LLM(
            model=folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=PROMPT + 128,
            max_num_batched_tokens=PROMPT,
            max_num_seqs=max(BATCHES),
            kv_cache_memory_bytes=CACHE_BYTES,
            gpu_memory_utilization=0.05,  # only so much must be free at the start
            enable_prefix_caching=False,
            compilation_config=graphs,
            tensor_parallel_size=ranks,
        )
    print(SAID + json.dumps({"start": time.perf_counter() - begun}), flush=True)
    generator = torch.Generator().manual_seed(0)
    for line in sys.stdin:
        count, tokens, new = json.loads(line)
        drawn = [torch.randint(10, SHAPE["vocab_size"], (tokens,), generator=generator) for _ in range(count)]
        prompts: Any = [{"prompt_token_ids": ids.tolist()} for ids in drawn]
        sampling = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
        begun = time.perf_counter()
        written = llm.generate(prompts, sampling, use_tqdm=False)
        took = time.perf_counter() - begun
        assert all(len(text.outputs[0].token_ids) == new for text in written)
        print(SAID + json.dumps({"took": took}), flush=True)


class Server:
    """A process that serves one kind. Raises `RuntimeError` with the end of its log where it has ended."""

    def __init__(self, kind: str, ranks: int, options: list[str], log: Path, patience: float) -> None:
        self.kind, self.log, self.patience = kind, log, patience
        environment = WITHOUT_A_NETWORK | {
            "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(ranks > 1)),
            "VLLM_WORKER_MULTIPROC_METHOD": "fork",  # ranks have what `serve` changes in vLLM, too
            "VLLM_USE_FLASHINFER_SAMPLER": "0",
            "VLLM_LOGGING_STREAM": "ext://sys.stderr",
            "PYTHONFAULTHANDLER": "1",  # what is aborted says where it stood
        }
        self.process = subprocess.Popen(
            [*START, "--serve", kind, *options],
            env=os.environ | environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log.open("w"),
            text=True,
            cwd=ROOT,
        )

    def hear(self) -> dict[str, float]:
        """What it says next."""
        assert self.process.stdout
        timer = threading.Timer(self.patience, self.process.send_signal, [signal.SIGABRT])
        timer.start()
        try:
            for line in self.process.stdout:
                if line.startswith(SAID):
                    heard: dict[str, float] = json.loads(line.removeprefix(SAID))
                    return heard
        finally:
            timer.cancel()
        raise RuntimeError(f"{self.kind} has ended: {self.log.read_text()[-1500:]}")

    def seconds(self, count: int, tokens: int, new: int) -> float:
        """The time that it takes for so many texts."""
        assert self.process.stdin
        print(json.dumps([count, tokens, new]), file=self.process.stdin, flush=True)
        return self.hear()["took"]


def measure(servers: list[Server], rounds: int) -> Iterator[dict[str, dict[str, list[float]]]]:
    """Seconds of a prompt of 8,192 tokens and of a step of each batch, by kind, in turns: what there is after each
    turn. A process that ends is left out from then on."""
    took: dict[str, dict[str, list[float]]] = {server.kind: {} for server in servers}
    for round in range(-1, rounds):  # the first one warms up
        for server in servers if round % 2 else servers[::-1]:
            try:
                found = {"prefill": server.seconds(1, PROMPT, 1)}
                for batch in BATCHES:
                    steps = STEPS if round >= 0 else 2
                    short, long = (server.seconds(batch, 16, new) for new in (1, 1 + steps))
                    found[f"batch {batch}"] = (long - short) / steps
            except (RuntimeError, OSError) as error:
                click.echo(f"{server.kind}: {error}", err=True)
                servers = [other for other in servers if other is not server]
                continue
            for what, seconds in found.items() if round >= 0 else ():
                took[server.kind].setdefault(what, []).append(seconds)
            yield took


def table(medians: dict[str, dict[str, float]]) -> list[str]:
    """Return the milliseconds of each kind, and how many times as fast as BF16 and FP8 it is."""
    lines = []
    for kind, found in medians.items():
        cells = []
        for what, seconds in found.items():
            ratios = [f"{medians[base][what] / seconds:.2f} x {base}" for base in ("BF16", "FP8") if base in medians]
            cells.append(f"{what} {seconds * 1e3:.2f} ms ({', '.join(ratios)})")
        lines.append(f"{kind:14s} " + "; ".join(cells))
    return lines


@click.command()
@click.option("--kind", "kinds", multiple=True, type=click.Choice(list(KINDS)), help="All of them if left out.")
@click.option("--layers", default=28, show_default=True)
@click.option("--rounds", default=3, show_default=True)
@click.option("--ranks", default=1, show_default=True, help="GPUs that share out each model.")
@click.option("--compiled", is_flag=True, help="With torch.compile, as vLLM is started by default; it takes minutes.")
@click.option("--patience", default=300.0, show_default=True, help="Seconds that a process may say nothing.")
@click.option("--logs", type=click.Path(path_type=Path), help="Keep vLLM's logs in this folder.")
@click.option("--serve", "served", hidden=True)
@json_option
def main(
    kinds: tuple[str, ...],
    layers: int,
    rounds: int,
    ranks: int,
    compiled: bool,
    patience: float,
    logs: Path | None,
    served: str | None,
    json_path: Path | None,
) -> None:
    """Print a line for each kind."""
    if served:
        return serve(served, layers, ranks, compiled)
    options = ["--layers", str(layers), "--ranks", str(ranks)]
    options += ["--compiled"] if compiled else []
    with tempfile.TemporaryDirectory() as folder:
        names = {kind: f"vllm-{kind.replace(', ', '-').replace(' ', '-')}.log" for kind in kinds or KINDS}
        servers = [
            Server(kind, ranks, options, (logs or Path(folder)) / name, patience) for kind, name in names.items()
        ]
        started = []
        for server in servers:
            try:
                seconds = server.hear()["start"], server.seconds(1, 16, 1)
                click.echo(f"{server.kind}: started in {seconds[0]:.1f} s, first token in {seconds[1]:.1f} s", err=True)
                started.append(server)
            except (RuntimeError, OSError) as error:
                click.echo(str(error), err=True)
        took: dict[str, dict[str, list[float]]] = {}
        for took in measure(started, rounds):
            write_figures(
                json_path,
                {"layers": layers, "ranks": ranks, "compiled": compiled, "seconds": took},
            )
        for server in servers:
            server.process.kill()
    medians = {kind: {what: statistics.median(s) for what, s in found.items()} for kind, found in took.items() if found}
    for line in table(medians):
        click.echo(line)
