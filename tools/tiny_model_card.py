"""The README.md of a tiny model, and the table in it."""

import platform
import shlex
import sys

import torch
import transformers
from tiny_model_run import Corpus, Kind, Row, Trained


def table_text(rows: list[Row]) -> str:
    """The results as a Markdown table."""
    lines = ["| model | training perplexity | held-out perplexity | held-out bits per byte |", "|---|--:|--:|--:|"]
    for row in rows:
        lines.append(
            f"| {row.name} | {row.training_perplexity:.2f} | {row.heldout_perplexity:.2f} | {row.heldout_bits:.3f} |"
        )
    return "\n".join(lines)


def model_card(
    kind: Kind, trained: Trained, tried: list[Trained], rows: list[Row], corpus: Corpus, parameters: int
) -> str:
    """README.md of the model: what it is, its data and licence, how good it is, how to make it again."""
    s = trained.settings
    sizes = {
        name: f"{sum(map(len, documents)):,} characters in {len(documents)} documents"
        for name, documents in vars(corpus).items()
    }
    variants = "\n".join(
        f"| {t.settings.shape} | {t.settings.dropout} | {t.settings.topic_share:.0%} | {t.settings.steps} "
        f"| {t.best_step} | {t.validation_bits:.4f} | {t.seconds:.0f} |"
        for t in tried
    )
    device = torch.cuda.get_device_name() if s.device == "cuda" else platform.machine()
    return f"""---
license: other
license_name: psf-2.0
license_link: https://docs.python.org/3/license.html
language: en
---
# {kind.title}
{kind.about(s, parameters)}

## Figures
{table_text(rows)}

All rows are over the same tokens: perplexity per token, protocol `dense`, windows of {s.context}. The bigrams were
trained on the tokens that the model was trained on, or on those of the topics among them.

## Data
The language reference in `pydoc_data.topics` of Python {platform.python_version()}, split by topic name
(`sparsepack/data/topics.py`), and the docstrings of its standard library, less every paragraph that shares ten
consecutive words with a held-out topic. Copyright Python Software Foundation, PSF License Version 2.

- training topics: {sizes["topics"]}
- validation topics, which chose the checkpoint: {sizes["validation"]}
- held-out topics: {sizes["held_out"]}
- docstrings, training only: {sizes["docstrings"]}

## Training
    {shlex.join(["python3", *sys.argv])}

Seed {s.seed}, batch {s.batch} x {s.context}, AdamW at {s.lr:g}, weight decay {s.weight_decay:g}, cosine schedule,
{s.topic_share:.0%} of the windows from the topics; torch {torch.__version__}, transformers
{transformers.__version__}, {device}. The run with the fewest bits per byte on the validation topics was kept
({s.shape}, dropout {s.dropout}, {s.steps} steps, best at step {trained.best_step}):

| blocks x FFN x vocabulary | dropout | from topics | steps | best step | validation bits per byte | seconds |
|---|--:|--:|--:|--:|--:|--:|
{variants}
"""
