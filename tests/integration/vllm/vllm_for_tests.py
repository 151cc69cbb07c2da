"""Slid weights for vLLM's layers, and vLLM in a process of its own."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import sparsepack
from sparsepack.calibrate.prune import PruneOptions
from sparsepack.formats.linear_folder import SCALE
from sparsepack.formats.orders.slide import Slide, encode
from sparsepack.formats.slide import POSITIONS
from sparsepack.models.pattern import Pattern, kept
from sparsepack.packing import PackRequest, pack
from sparsepack.runtime.reference.products import Sparse24Matrix
from sparsepack.runtime.sparse24_operator import prepare, sparse24_linear

ON_TWO_CORES = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
}
"""The environment in which vLLM runs on a small machine without a network."""


PROMPTS = [
    *(
        "Once upon a time",
        "The little dog",
        "She said",
        "It was a cold evening, and",
        "A",
        "There is no",
        "The sea was",
    ),
    *("When he came home", "In the year", "Nobody knew", "My dear friend,", "The door", "At last they", "What is the"),
    *("Of all the", "A small boat", "He had never", "I think", "The old man looked at the", "And then"),
]
"""Of these texts are written."""


def made(model: str, folder: Path, format: str = "slide-int8") -> Path:
    """The model pruned 6 of 8 and slid."""
    sparsepack.prune(model, folder / "pruned", PruneOptions(6, 8, method="magnitude"))
    pack(PackRequest(str(folder / "pruned"), folder / "slid", format=format))
    return folder / "slid"


def slid(rows: int, columns: int, pattern: Pattern, dtype: torch.dtype = torch.int8) -> Sparse24Matrix:
    """Random weights, pruned by magnitude and slid."""
    weight, how = torch.randn(rows, columns), Slide(pattern)
    return Sparse24Matrix(*encode(weight * kept(weight.abs(), pattern), how, dtype), how, columns)


def stored(matrix: Sparse24Matrix) -> dict[str, Tensor]:
    """The tensors of a slid folder, by what follows the Linear's name."""
    tensors = {"weight": matrix.values, "weight" + POSITIONS: matrix.positions}
    return tensors if matrix.scale is None else {**tensors, "weight" + SCALE: matrix.scale}


def together(*matrices: Sparse24Matrix) -> Sparse24Matrix:
    """The matrix of all rows."""
    first = matrices[0]
    values = torch.cat([m.values.view(torch.uint8) for m in matrices]).view(first.values.dtype)
    positions, scales = torch.cat([m.positions for m in matrices]), [m.scale for m in matrices if m.scale is not None]
    return Sparse24Matrix(values, positions, torch.cat(scales) if scales else None, first.how, first.columns)


def join(file: Path, rank: int, ranks: int) -> None:
    """Make this process one of the ranks that meet at a file."""
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    # On processors for which vLLM has kernels, ranks exchange over shared memory, whose name must be that of no other
    # group of the machine; vLLM's own workers set this before they join.
    os.environ["VLLM_DIST_IDENT"] = f"sparsepack-{hashlib.sha256(str(file).encode()).hexdigest()[:16]}"
    init_distributed_environment(ranks, rank, f"file://{file}", rank, backend="gloo")
    initialize_model_parallel(ranks)


def load_tensors(layer: nn.Module, tensors: Mapping[str, Tensor], *shard: Any) -> None:
    """Load the tensors of a folder, by what follows the Linear's name, by vLLM's loaders."""
    parameters = dict(layer.named_parameters())
    for name, tensor in tensors.items():
        parameters[name].weight_loader(parameters[name], tensor, *shard)


def ready(layer: nn.Module) -> nn.Module:
    """The layer, prepared."""
    layer.quant_method.process_weights_after_loading(layer)  # type: ignore[union-attr, operator]
    return layer


def in_transformers(folder: Path, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """The model and its tokenizer, as transformers has them."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return model, AutoTokenizer.from_pretrained(folder)


def share_out(model: Any, ranks: int) -> None:
    """Let transformers quantise inputs of Linears whose columns are shared out as several ranks do, each with its own
    scale."""

    def of(matrix: Sparse24Matrix) -> Callable[[Tensor], Tensor]:
        width, parts = matrix.columns // ranks, (matrix.values.chunk(ranks, -1), matrix.positions.chunk(ranks, -1))
        matrices = [
            Sparse24Matrix(values.contiguous(), positions.contiguous(), matrix.scale, matrix.how, width)
            for values, positions in zip(*parts, strict=True)
        ]
        prepared = [prepare(part, model.dtype) for part in matrices]

        def by_ranks(x: Tensor) -> Tensor:
            pieces = zip(x.chunk(ranks, -1), matrices, prepared, strict=True)
            return torch.stack([sparse24_linear(piece, part, None, ready) for piece, part, ready in pieces]).sum(0)

        return by_ranks

    for layer in model.model.layers:
        for linear in (layer.self_attn.o_proj, layer.mlp.down_proj):
            linear.forward = of(linear.matrix)


def assert_greedy(
    folder: Path,
    written: list[list[int]],
    margin: float = 0,
    ranks: int = 1,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> None:
    """Every token is the one that transformers finds the likeliest behind those before it, or one whose logit is not
    further below than `margin` standard deviations of the logits."""
    model, tokenizer = in_transformers(folder, dtype)
    model.to(device)
    if ranks > 1:
        share_out(model, ranks)
    furthest, others = 0.0, 0
    for prompt, tokens in zip(PROMPTS, written, strict=True):
        ids = torch.tensor([tokenizer(prompt).input_ids + tokens], device=device)
        with torch.no_grad():
            logits = model(ids).logits[0, -len(tokens) - 1 : -1].float().cpu()
        chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        missed = (logits.amax(1) - chosen) / logits.std(1)
        furthest, others = max(furthest, float(missed.max())), others + int((missed > 0).sum())
        assert (missed <= margin).all(), (prompt, missed.tolist())
    print(f"{others} of {sum(map(len, written))} tokens are not the likeliest, at most {furthest:.4f} below")


def in_vllm(
    folder: Path, prompts: list[str], tokens: int = 16, reload: Path | None = None, **options: Any
) -> list[list[int]]:
    """The tokens that vLLM writes greedily, served as `vllm serve` would. Raises `Refused` with what it has said.

    reload -- once it has written, vLLM loads the weights of this folder in place of the others; what it writes then
              is returned
    """
    asked = json.dumps(
        {
            "folder": str(folder),
            "prompts": prompts,
            "tokens": tokens,
            "options": options,
            "reload": None if reload is None else str(reload),
        }
    )
    several = options.get("tensor_parallel_size", 1) > 1
    run = started(["-c", _SERVE, asked], {**ON_TWO_CORES, "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(several))})
    if run.returncode:
        raise Refused(run.stdout + run.stderr)
    (line,) = [line for line in run.stdout.splitlines() if line.startswith(_WRITTEN)]  # beside vLLM's log
    found: list[list[int]] = json.loads(line.removeprefix(_WRITTEN))
    return found


class Refused(Exception):
    """vLLM has ended with an error."""


STILL = 120.0
"""A start hangs that has used less than a hundredth of one core for so many seconds; a slow one goes on."""
SILENT = 1800.0
"""It hangs, too, where it has written nothing for so many seconds: processes that wait for each other may spin."""
_POLL = 0.2


class Hangs(Exception):
    """vLLM was ended, since it did nothing any more."""


def started(arguments: list[str], environment: Mapping[str, str]) -> "subprocess.CompletedProcess[str]":
    """Python with these arguments, in a process of its own, however long it takes. Raises `Hangs` with what it has said
    and where its threads are."""
    command = [sys.executable, *arguments]
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as error:
        process = subprocess.Popen(
            command,
            env={**os.environ, "PYTHONFAULTHANDLER": "1", **environment},
            stdout=out,
            stderr=error,
            start_new_session=True,
        )

        def said(file: Any) -> str:
            file.seek(0)
            return str(file.read().decode(errors="replace"))

        try:
            if why := _hangs(process, lambda: os.fstat(out.fileno()).st_size + os.fstat(error.fileno()).st_size):
                process.send_signal(signal.SIGABRT)  # Python writes the stacks of all threads
                with suppress(subprocess.TimeoutExpired):
                    process.wait(30)
                raise Hangs(f"{why}: {said(out)}{said(error)}")
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # ranks that outlive it
            process.wait()
        return subprocess.CompletedProcess(command, process.returncode, said(out), said(error))


def _hangs(process: "subprocess.Popen[bytes]", written: Callable[[], int]) -> str:
    """Wait for the end of a process; why it hangs, where it does. written -- the bytes that it has written so far"""
    busy = spoke = (time.monotonic(), 0.0)  # when it was last seen at work, or writing, and how much there was then
    while process.poll() is None:
        time.sleep(_POLL)
        now, seconds, size = time.monotonic(), _seconds_of_session(process.pid), written()
        if abs(seconds - busy[1]) > 0.01 * STILL:
            busy = now, seconds
        if size != spoke[1]:
            spoke = now, size
        if now - busy[0] > STILL:
            return f"it has used no processor for {STILL:.0f} s"
        if now - spoke[0] > SILENT:
            return f"it has written nothing for {SILENT:.0f} s"
    return ""


def _seconds_of_session(session: int) -> float:
    """Processor seconds of all processes of a session, and of their children that have ended."""
    ticks = 0
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError):  # it has just ended
                fields = (entry / "stat").read_text().rpartition(")")[2].split()  # from the process's state on
                if int(fields[3]) == session:
                    ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


_WRITTEN = "tokens: "
_SERVE = f"""
import json, sys
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    options = dict(max_model_len=256, max_num_batched_tokens=256, dtype="float32") | asked["options"]
    llm = LLM(model=asked["folder"], **options)
    sampling = SamplingParams(temperature=0, max_tokens=asked["tokens"])
    written = llm.generate(asked["prompts"], sampling)
    if asked["reload"]:
        llm.collective_rpc("reload_weights", kwargs=dict(weights_path=asked["reload"]))
        llm.reset_prefix_cache()
        written = llm.generate(asked["prompts"], sampling)
    print("{_WRITTEN}" + json.dumps([list(text.outputs[0].token_ids) for text in written]))
"""
