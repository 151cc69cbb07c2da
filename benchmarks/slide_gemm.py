"""The four linears of Qwen2.5-7B on a GPU: dense BF16, INT8 and FP8 beside slid weights of four patterns, in turns.

Everything that a layer costs is counted: inputs are quantised (and lifted), outputs scaled. See `sparsepack bench`,
which does the same with the shapes of a slid folder.

NVIDIA's library is slower on Hopper with INT8 than with BF16, so a ratio to it flatters slid weights. With --vllm there
are two more baselines, "INT8, vLLM" and "FP8, vLLM": what vLLM makes of a W8A8 checkpoint, which is its own
quantisation of the inputs and CUTLASS's product. LIBRARY is `vllm/_C_stable_libtorch.abi3.so` of a wheel that was built
for the torch that is installed; nothing else of vLLM is needed.
"""

from functools import partial
from pathlib import Path

import click
import torch
from torch import Tensor

from benchmarks.shared.timing import json_option, write_figures
from sparsepack.bench.linears import TOKENS, Contender, Linear, Run, bench_linears, copies
from sparsepack.bench.run import linears_table
from sparsepack.formats.orders.slide import quantise_rows

QWEN_7B = (
    Linear("Wqkv", 4608, 3584),
    Linear("Wo", 3584, 3584),
    Linear("W13", 37888, 3584),
    Linear("W2", 3584, 18944),
)


def by_vllm(weight: Tensor, dtype: torch.dtype) -> tuple[list[Run], int]:
    """Dense products as vLLM 0.24 makes them, with a scale for each token and one for each row of weights."""
    q, w_scale = quantise_rows(weight, dtype)
    scales = w_scale[:, None]

    def of(copy: Tensor) -> Run:
        def run(x: Tensor) -> Tensor:
            values = torch.empty_like(x, dtype=dtype)
            scale = torch.empty(len(x), 1, device=x.device)
            if dtype == torch.int8:
                torch.ops._C.dynamic_scaled_int8_quant(values, x, scale, None)
            else:
                torch.ops._C.dynamic_per_token_scaled_fp8_quant(values, x, scale, None)
            y = x.new_empty(len(x), len(copy))
            torch.ops._C.cutlass_scaled_mm(y, values, copy.t(), scale, scales, None)
            return y

        return run

    return copies(q, of)


OF_VLLM = [
    Contender("INT8, vLLM", "INT8", None, partial(by_vllm, dtype=torch.int8)),
    Contender("FP8, vLLM", "FP8", None, partial(by_vllm, dtype=torch.float8_e4m3fn)),
]


@click.command()
@click.option("--tokens", multiple=True, type=int, default=TOKENS, show_default=True)
@click.option("--rounds", default=7, show_default=True)
@click.option("--vllm", type=click.Path(exists=True, dir_okay=False), help="vLLM's library of kernels.")
@json_option
def main(tokens: tuple[int, ...], rounds: int, vllm: str | None, json_path: Path | None) -> None:
    """Print the tables."""
    others: list[Contender] = []
    if vllm:
        torch.ops.load_library(vllm)  # type: ignore[no-untyped-call]
        others += OF_VLLM
    result = bench_linears(QWEN_7B, tokens, rounds=rounds, others=others)
    click.echo(linears_table(result))
    write_figures(json_path, result)
