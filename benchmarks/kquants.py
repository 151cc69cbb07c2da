"""What llama.cpp's K-quants of a model cost in accuracy, on the windows and by the code that measure our own formats.

llama-cpp-python quantises the model, with an importance matrix where there is one, gguf-py decodes the weights to
float32, and they are scored as the weights of a checkpoint. Embedding, output matrix and norms stay in float on every
row, so that a row shows what the type does to the decoder blocks. "bits read" are of a weight of the blocks, for each
decoded token: llama.cpp reads all of them, and puts matrices whose width is no multiple of 256 into another type. The
windows are those of what_is_lost: of the text's second half.
"""

import ctypes
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import gguf
import llama_cpp
import torch
from torch import Tensor

from benchmarks.shared.evaluation import BOOKS_MODEL, BOOKS_TEXT, ChangedWeights, Windows, windows_of_half
from benchmarks.shared.llama_cpp import silent
from benchmarks.shared.timing import json_option, write_figures
from sparsepack.calibrate.folder import Calibration
from sparsepack.eval.perplexity import score_windows, summarise
from sparsepack.eval.subject import TransformersSubject, open_subject
from sparsepack.models.checkpoint.gguf_config import gguf_names
from sparsepack.models.checkpoint.llama_cpp_tensors import LlamaCppTensors
from sparsepack.packing import PackRequest, pack

TYPES = ("Q4_K_S", "Q3_K_M", "Q3_K_S", "Q2_K")


@dataclass(frozen=True)
class Quantised:
    """A model in one of llama.cpp's types.

    weights    -- those of the blocks that it changes, decoded, by their Hugging Face names
    bits       -- that a weight of the blocks takes
    path       -- of the file, with embedding and output matrix as llama.cpp chooses them for the type
    """

    weights: Mapping[str, Tensor]
    bits: float
    path: Path


def quantised(
    exact: Path, type: str, layout: LlamaCppTensors, importance: Mapping[str, Tensor], folder: Path
) -> Quantised:
    """Put a GGUF in F32 through llama.cpp's `type` and back.

    layout     -- of the model's tensors in llama.cpp's files
    importance -- mean squares of what enters a matrix, float32 [columns] each, by its name in the GGUF; empty: it is
                  quantised without an importance matrix
    folder     -- where the file is made
    """
    llama_cpp.llama_log_set(silent, ctypes.c_void_p(0))
    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{type}")
    entries = (llama_cpp.llama_model_imatrix_data * (len(importance) + 1))()  # the last, without a name, ends them
    for entry, (name, squares) in zip(entries, importance.items(), strict=False):
        entry.name, entry.size = name.encode(), len(squares)
        entry.data = (ctypes.c_float * len(squares))(*squares.tolist())
    if importance:
        parameters.imatrix = entries
    packed = folder / f"{type}.gguf"
    failed = llama_cpp.llama_model_quantize(str(exact).encode(), str(packed).encode(), ctypes.byref(parameters))
    if failed:
        raise RuntimeError(f"llama.cpp could not quantise {exact} to {type}")
    weights: dict[str, Tensor] = {}
    bits = elements = 0
    tensors = gguf.GGUFReader(packed).tensors
    names = gguf_names(layout.family, len(tensors))
    for tensor in tensors:
        if not tensor.name.startswith("blk.") or tensor.tensor_type == gguf.GGMLQuantizationType.F32:
            continue
        bits += 8 * tensor.n_bytes
        elements += tensor.n_elements
        value = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
        name = names[tensor.name]
        weights[name] = layout.here(name, value)
    return Quantised(weights, float(bits / elements), packed)


_SITES = {
    "attn_in": ("attn_q", "attn_k", "attn_v"),
    "attn_out": ("attn_output",),
    "mlp_in": ("ffn_gate", "ffn_up"),
    "mlp_mid": ("ffn_down",),
}
"""The matrices that a site enters, by their names in llama.cpp's files."""


def importance_of(calibration: Calibration) -> dict[str, Tensor]:
    """Return what llama-imatrix would find on the text of a calibration: the mean square of each input of a matrix."""
    tokens = calibration.manifest["tokens"]["counted"]
    return {
        f"blk.{layer}.{matrix}.weight": (statistics[f"{site}.second_moment"] / tokens).float()
        for layer, statistics in enumerate(calibration.layers)
        for site, matrices in _SITES.items()
        for matrix in matrices
    }


def kquant_subjects(
    model: str,
    types: Iterable[str],
    reference: TransformersSubject,
    importance: Mapping[str, Tensor] | None = None,
    folder: Path | None = None,
) -> Iterator[tuple[str, Quantised, TransformersSubject]]:
    """Yield each type, what it makes of the model, and that as a subject of evaluation.

    reference  -- the model as it is
    importance -- as `quantised` takes it
    folder     -- where files stay; None: nowhere
    """
    source = reference.source
    layout = LlamaCppTensors.of(source.family, source.config)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        exact, output = Path(temporary) / "f32.gguf", folder or Path(temporary)
        pack(PackRequest(model, exact, format="f32", output_type="f32", embedding_type="f32"))
        for type in types:
            made = quantised(exact, type, layout, importance or {}, output)
            yield type, made, replace(reference, source=ChangedWeights(source, made.weights))


def kquant_rows(
    model: str, types: Iterable[str], reference: TransformersSubject, data: Windows
) -> list[dict[str, Any]]:
    """The figures of each type on the second half of every window."""
    rows = []
    for type, made, subject in kquant_subjects(model, types, reference):
        scores = score_windows(subject.scorer(), *data, "dense", reference.scorer(), batch=4, second_half=True)
        rows.append({"type": type, "bits_read": made.bits, **summarise(scores, 1)})
    return rows


@click.command()
@click.argument("model", default=BOOKS_MODEL)
@click.option("--text", default=BOOKS_TEXT, show_default=True)
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
        rows = kquant_rows(model, types, reference, windows_of_half(reference, text, windows))
    print("| type | bits read | perplexity | KL |\n|---|--:|--:|--:|")
    for row in rows:
        loss = 100 * (row["perplexity_ratio"]["value"] - 1)
        print(f"| {row['type']} | {row['bits_read']:.2f} | {loss:+.2f} % | {row['kl_divergence']['value']:.4f} |")
    write_figures(json_path, rows)
