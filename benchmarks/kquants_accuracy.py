"""What llama.cpp's K-quants of a model cost in accuracy, on the windows and by the code that measure our own formats.

    python benchmarks/kquants_accuracy.py [MODEL] [--text TEXT] [--windows 160] [--type Q4_K_S] [--device cuda]

llama-cpp-python quantises the model without an importance matrix, gguf-py decodes the weights to float32, and they are
scored as the weights of a checkpoint. Embedding, output matrix and norms stay in float on every row, so that a row
shows what the type does to the decoder blocks. "bits read" are of a weight of the blocks, for each decoded token:
llama.cpp reads all of them. The windows are those of rotation_accuracy.py: of the text's second half.
"""

import ctypes
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import gguf
import llama_cpp
import torch
from accuracy_windows import Windows, windows_of_half
from books import SHARED
from changed_weights import ChangedWeights
from figures import json_option, write_figures
from torch import Tensor

from sparsepack.eval.perplexity import score_windows, summarise
from sparsepack.eval.subject import StockSubject, open_subject
from sparsepack.models.checkpoint.gguf_names import gguf_names, unpermute_rotary
from sparsepack.models.family import Family
from sparsepack.packing import PackRequest, pack

TYPES = ("Q4_K_S", "Q3_K_M", "Q3_K_S", "Q2_K")
_FLOAT = gguf.GGMLQuantizationType.F32


def quantised(exact: Path, type: str, family: Family, heads: Mapping[str, int]) -> tuple[dict[str, Tensor], float]:
    """Put a GGUF in F32 through llama.cpp's `type` and back: the weights that it changes, by their Hugging Face names,
    and the bits that a weight of the blocks takes in that type.

    heads -- of the projections whose rotary pairs lie side by side in llama.cpp's files
    """
    asked = llama_cpp.llama_model_quantize_default_params()
    asked.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{type}")
    asked.token_embedding_type = asked.output_tensor_type = _FLOAT
    changed: dict[str, Tensor] = {}
    with tempfile.TemporaryDirectory() as folder:
        packed = Path(folder) / f"{type}.gguf"
        failed = llama_cpp.llama_model_quantize(str(exact).encode(), str(packed).encode(), ctypes.byref(asked))
        if failed:
            raise RuntimeError(f"llama.cpp could not quantise {exact} to {type}")
        bits = weights = 0
        tensors = gguf.GGUFReader(packed).tensors
        names = gguf_names(family, len(tensors))
        for tensor in tensors:
            if tensor.tensor_type == _FLOAT:
                continue
            bits += 8 * tensor.n_bytes
            weights += tensor.n_elements
            value = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
            name = names[tensor.name]
            count = heads.get(name.split(".")[-2])
            changed[name] = unpermute_rotary(value, count) if count else value
    return changed, float(bits / weights)


def kquant_rows(
    model: str, types: Iterable[str], reference: StockSubject, data: Windows, device: str
) -> list[dict[str, Any]]:
    """The figures of each type on the second half of every window."""
    rows, source = [], reference.source
    config = source.config
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    with tempfile.TemporaryDirectory() as folder:
        exact = Path(folder) / "f32.gguf"
        pack(PackRequest(model, exact, format="f32", output_type="f32", embedding_type="f32"))
        for type in types:
            changed, bits = quantised(exact, type, source.family, heads if source.family.gguf_permuted else {})
            subject = replace(reference, source=ChangedWeights(source, changed))
            scores = score_windows(subject.scorer(), *data, "dense", reference.scorer(), batch=4, second_half=True)
            rows.append({"type": type, "bits_read": bits, **summarise(scores, 1)})
    return rows


@click.command()
@click.argument("model", default=str(SHARED / "models" / "books-26m-silu"))
@click.option("--text", default=str(SHARED / "text" / "books.validation.jsonl.xz"), show_default=True)
@click.option(
    "--windows",
    default=160,
    show_default=True,
    help="Evaluation windows of 2048 tokens, evenly spread over the second half of the text.",
)
@click.option("--type", "types", multiple=True, default=TYPES, show_default=True)
@click.option("--device", default="cpu", show_default=True)
@json_option
def main(model: str, text: str, windows: int, types: tuple[str, ...], device: str, json_path: Path | None) -> None:
    """Print the table for one model."""
    reference = open_subject(model, None, device, "float32")
    with torch.inference_mode():
        rows = kquant_rows(model, types, reference, windows_of_half(reference, text, windows, second=True), device)
    print("| type | bits read | perplexity | KL |\n|---|--:|--:|--:|")
    for row in rows:
        loss = 100 * (row["perplexity_ratio"]["value"] - 1)
        print(f"| {row['type']} | {row['bits_read']:.2f} | {loss:+.2f} % | {row['kl_divergence']['value']:.4f} |")
    write_figures(json_path, rows)


if __name__ == "__main__":
    main()
