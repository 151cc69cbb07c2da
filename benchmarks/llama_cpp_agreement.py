"""Does stock llama.cpp compute what we compute on a plain Q4_K GGUF, and if not exactly, why?

    python benchmarks/llama_cpp_agreement.py MODEL --text TEXT

Teacher-forced logits over one stretch of text, against the stock transformers model on the same dequantised weights:
llama.cpp on the Q4_K file; llama.cpp on the very same weights stored as F32; and our own model with each projection's
input rounded to 8 bits per 256 channels, as llama.cpp does before a Q4_K product.
"""

import tempfile
from pathlib import Path

import click
import numpy as np
import torch
from nearness import relative_error

from sparsepack.eval.subject import Subject, open_subject
from sparsepack.files.text import read_text
from sparsepack.models.checkpoint.checkpoint import open_checkpoint
from sparsepack.models.stock.hooks import site_hooks
from sparsepack.models.tokenizer.windows import rolling_windows
from sparsepack.packing import PackRequest, pack
from sparsepack.tables import Table, markdown


@click.command()
@click.argument("model")
@click.option("--text", required=True)
@click.option("--tokens", default=1024)
@click.option("--window", default=5, help="Which window of the text.")
def main(model: str, text: str, tokens: int, window: int) -> None:
    """Print the agreement table."""
    with tempfile.TemporaryDirectory() as folder:
        packed, same = Path(folder) / "q4_k.gguf", Path(folder) / "f32.gguf"
        pack(PackRequest(model, packed, format="q4_k"))
        subject = open_subject(str(packed))
        ids = rolling_windows(subject.tokenizer, read_text(text), tokens)[0][window]
        ours = _logits(subject, ids)
        source = open_checkpoint(model)
        subject.model.save_pretrained(Path(folder) / "weights")
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (Path(folder) / "weights" / name).write_bytes((source.path / name).read_bytes())
        pack(PackRequest(str(Path(folder) / "weights"), same, format="f32"))
        with site_hooks(list(enumerate(subject.model.model.layers)), subject.family, _rounded):
            eight_bit = _logits(subject, ids)
        cases = {
            "llama.cpp, Q4_K": _llama_cpp(packed, ids),
            "llama.cpp, the same weights as F32": _llama_cpp(same, ids),
            "transformers, inputs rounded to 8 bits": eight_bit,
        }
        rows = [[name, f"{relative_error(it, ours):.5f}", f"{_agreement(it, ours):.2%}"] for name, it in cases.items()]
        print(
            markdown(Table(["against transformers on the dequantised weights", "relative L2", "same top token"], rows))
        )


@torch.inference_mode()
def _logits(subject: Subject, ids: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = subject.model(ids[None]).logits[0]
    return logits


def _llama_cpp(path: Path, ids: torch.Tensor) -> torch.Tensor:
    import llama_cpp
    from llama_cpp_peer import expect_runs

    expect_runs(path)
    peer = llama_cpp.Llama(str(path), n_ctx=len(ids), logits_all=True, verbose=False)
    peer.eval(ids.tolist())
    return torch.tensor(np.array(peer.scores[: len(ids)]))


def _rounded(layer: int, site: str, x: torch.Tensor) -> torch.Tensor:
    blocks = x.reshape(*x.shape[:-1], -1, 256)
    unit = blocks.abs().amax(-1, keepdim=True) / 127
    return ((blocks / unit).round() * unit).reshape(x.shape)


def _agreement(first: torch.Tensor, second: torch.Tensor) -> float:
    return float((first.argmax(-1) == second.argmax(-1)).float().mean())


if __name__ == "__main__":
    main()
