"""How the tiny models that sparsepack ships are trained, on English text that comes with every Python.

Every combination of `--dropout`, `--steps`, `--topic-share` and `--shape` is tried, the one with the fewest bits per
byte on a validation slice of the training topics is kept, and only then are the held-out topics looked at. What differs
between models is a `Kind`: `train_tiny_model.py` and `train_tiny_mixture.py` have one each.
"""

import itertools
import json
import math
import sys
import time
from pathlib import Path

import click
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoModelForCausalLM, PreTrainedModel

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from bigram import bigram_table, table_nll, unigram_table
from docstrings import docstrings
from tiny_model_card import model_card, table_text
from tiny_model_run import BOS, BOS_TEXT, Corpus, Kind, Row, Settings, Shape, Trained

from sparsepack.data.topics import heldout_text, training_text

LARGEST_FOLDER = 4_000_000
VALIDATE_EVERY = 1 / 20
SHAPES = "Blocks, width of an MLP or of an expert, and vocabulary."


def gather_corpus() -> Corpus:
    """All the text, from the running Python's own files. Every eighth training topic by size is for validation."""
    topics = training_text()
    return Corpus(
        topics=[document for i, document in enumerate(topics) if i % 8 != 4],
        validation=[document for i, document in enumerate(topics) if i % 8 == 4],
        held_out=heldout_text(),
        docstrings=docstrings(),
    )


def train_tokenizer(documents: list[str], vocabulary: int) -> Tokenizer:
    """A byte-level BPE with one special token, id 0, that opens and ends a document."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[BOS_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return tokenizer


def stream(tokenizer: Tokenizer, documents: list[str]) -> torch.Tensor:
    """The documents' tokens, BOS before each: int64 [n]."""
    return torch.tensor([token for document in documents for token in [BOS, *_ids(tokenizer, document)]])


def joined(tokenizer: Tokenizer, documents: list[str]) -> tuple[torch.Tensor, int]:
    """The documents as one text: its tokens, int64 [n], and its length in bytes."""
    text = "\n\n".join(documents)
    return torch.tensor(_ids(tokenizer, text)), len(text.encode())


def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def with_dropout(model: PreTrainedModel, dropout: float) -> PreTrainedModel:
    """The model, with dropout on the embedding and on what each block adds to the residual stream."""

    def drop(module: torch.nn.Module, _args: object, output: torch.Tensor) -> torch.Tensor:
        return F.dropout(output, dropout, module.training)

    model.model.embed_tokens.register_forward_hook(drop)
    for block in model.model.layers:
        block.self_attn.o_proj.register_forward_hook(drop)
        block.mlp.register_forward_hook(drop)
    return model


@torch.no_grad()
def model_nll(model: PreTrainedModel, tokens: torch.Tensor, context: int) -> torch.Tensor:
    """Negative log-likelihood in nats of each token, the `dense` protocol: float64 [n], on the CPU.

    Window i is tokens [C i, C (i+1)), its input BOS and all of them but the last; the last window may be shorter.
    """
    model.eval()
    whole = len(tokens) // context * context
    batches = [*torch.split(tokens[:whole].view(-1, context), 16), tokens[None, whole:]]  # each [windows, <= context]
    parts = []
    for windows in (batch.to(model.device) for batch in batches if batch.numel()):
        logits = model(input_ids=F.pad(windows[:, :-1], (1, 0), value=BOS), use_cache=False).logits.float()
        parts.append(F.cross_entropy(logits.flatten(0, 1), windows.flatten(), reduction="none").double().cpu())
    return torch.cat(parts)


def train(kind: Kind, settings: Settings, tokenizer: Tokenizer, corpus: Corpus) -> Trained:
    """Train one model of the kind; the weights returned are those of its best validation."""
    begun = time.monotonic()
    torch.manual_seed(settings.seed)
    model = with_dropout(kind.build(settings), settings.dropout).to(settings.device)
    sources = [stream(tokenizer, documents).to(settings.device) for documents in (corpus.topics, corpus.docstrings)]
    validation, validation_bytes = joined(tokenizer, corpus.validation)
    decayed = [weight for weight in model.parameters() if weight.ndim >= 2]
    others = [weight for weight in model.parameters() if weight.ndim < 2]
    optimiser = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": others, "weight_decay": 0.0}],
        lr=settings.lr,
        betas=(0.9, 0.95),
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: _rate(step, settings.steps))
    every = max(1, round(settings.steps * VALIDATE_EVERY))
    best_bits, best_step, best_weights = math.inf, 0, {}
    for step in range(1, settings.steps + 1):
        model.train()
        windows = _sample(sources, settings)  # [batch, context]
        inputs = F.pad(windows[:, :-1], (1, 0), value=BOS)
        with torch.autocast(settings.device, torch.bfloat16, enabled=settings.device == "cuda"):
            output = model(input_ids=inputs, use_cache=False)
        loss = F.cross_entropy(output.logits.float().flatten(0, 1), windows.flatten()) + kind.more_loss(model, output)
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        if step % every == 0 or step == settings.steps:
            bits = bits_per_byte(model_nll(model, validation, settings.context), validation_bytes)
            if bits < best_bits:
                best_bits, best_step = bits, step
                best_weights = {name: weight.detach().clone() for name, weight in model.state_dict().items()}
            click.echo(f"step {step}: {bits:.4f} bits/byte, {time.monotonic() - begun:.0f} s", err=True)
    model.load_state_dict(best_weights)
    return Trained(settings, tokenizer, model, best_bits, best_step, time.monotonic() - begun)


def _rate(step: int, steps: int) -> float:
    warm = max(1, steps // 20)
    if step < warm:
        return (step + 1) / warm
    return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))


def _sample(sources: list[torch.Tensor], settings: Settings) -> torch.Tensor:
    from_topics = round(settings.batch * settings.topic_share)
    windows = []
    for tokens, count in zip(sources, (from_topics, settings.batch - from_topics), strict=True):
        starts = torch.randint(len(tokens) - settings.context, (count, 1), device=tokens.device)
        windows.append(tokens[starts + torch.arange(settings.context, device=tokens.device)])
    return torch.cat(windows)


def bits_per_byte(nll: torch.Tensor, size: int) -> float:
    """From nats per token to bits per byte of the text that the tokens spell."""
    return nll.sum().item() / math.log(2) / size


def results(model: PreTrainedModel, tokenizer: Tokenizer, corpus: Corpus) -> list[Row]:
    """The model beside unigram and bigram models of the tokens it was trained on, and of those of the topics alone.

    Training perplexity is over the training topics, for every row; all rows predict the same tokens.
    """
    context = model.config.max_position_embeddings
    vocabulary = model.config.vocab_size
    train_tokens, _ = joined(tokenizer, corpus.topics)
    held_tokens, held_bytes = joined(tokenizer, corpus.held_out)
    topics = stream(tokenizer, corpus.topics)
    everything = torch.cat([topics, stream(tokenizer, corpus.docstrings)])

    def row(name: str, train_nll: torch.Tensor, held_nll: torch.Tensor) -> Row:
        perplexities = train_nll.mean().exp().item(), held_nll.mean().exp().item()
        return Row(name, *perplexities, bits_per_byte(held_nll, held_bytes))

    tables = {
        "unigram": unigram_table(everything, vocabulary),
        "bigram, Kneser-Ney": bigram_table(everything, vocabulary),
        "bigram, Kneser-Ney, topics only": bigram_table(topics, vocabulary),
    }
    rows = [row(n, table_nll(t, train_tokens, BOS), table_nll(t, held_tokens, BOS)) for n, t in tables.items()]
    return [*rows, row("this model", model_nll(model, train_tokens, context), model_nll(model, held_tokens, context))]


def save(trained: Trained, folder: Path) -> None:
    """Write the checkpoint in bfloat16 and the tokenizer, without needless white space; it puts BOS before a text."""
    folder.mkdir(parents=True, exist_ok=True)
    model = trained.model.to("cpu", torch.bfloat16)
    model.config.attention_dropout = 0.0
    model.save_pretrained(folder)
    trained.tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS_TEXT} $A", pair=f"{BOS_TEXT} $A {BOS_TEXT}:1 $B:1", special_tokens=[(BOS_TEXT, BOS)]
    )
    tokenizer = json.dumps(json.loads(trained.tokenizer.to_str()), ensure_ascii=False, separators=(",", ":"))
    (folder / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS_TEXT,
        "eos_token": BOS_TEXT,
        "unk_token": None,
        "model_max_length": trained.settings.context,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


@click.command()
@click.option("-o", "--output", type=click.Path(file_okay=False, path_type=Path), required=True)
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@click.option("--shape", "shapes", multiple=True, default=["3x512x768", "2x768x1024"], show_default=True, help=SHAPES)
@click.option("--dropout", "dropouts", type=float, multiple=True, default=[0.1, 0.2], show_default=True)
@click.option("--steps", "step_counts", type=int, multiple=True, default=[1500, 600], show_default=True)
@click.option("--context", default=1024, show_default=True, help="Tokens per window, and the model's context.")
@click.option("--batch", default=16, show_default=True, help="Windows per step.")
@click.option("--lr", default=2e-3, show_default=True)
@click.option("--weight-decay", default=0.1, show_default=True)
@click.option(
    "--topic-share",
    "topic_shares",
    type=float,
    multiple=True,
    default=[0.3],
    show_default=True,
    help="Share of the windows that come from the topics; the others come from docstrings.",
)
@click.option("--seed", default=0, show_default=True)
@click.option("--seconds", default=200.0, show_default=True, help="No run is begun that would not end by then.")
@click.pass_obj
def main(
    kind: Kind,
    output: Path,
    device: str,
    shapes: tuple[str, ...],
    dropouts: tuple[float, ...],
    step_counts: tuple[int, ...],
    context: int,
    batch: int,
    lr: float,
    weight_decay: float,
    topic_shares: tuple[float, ...],
    seed: int,
    seconds: float,
) -> None:
    """Train a tiny model and write it to a folder, with its tokenizer and model card."""
    if device == "cuda" and not torch.cuda.is_available():
        raise click.UsageError("--device cuda: torch sees no CUDA device; use --device cpu")
    begun = time.monotonic()
    corpus = gather_corpus()
    parsed = [Shape.parse(shape, kind.widths) for shape in shapes]
    tokenizers = {v: train_tokenizer(corpus.topics, v) for v in {shape.vocabulary for shape in parsed}}
    tried: list[Trained] = []
    for dropout, steps, share, shape in itertools.product(dropouts, step_counts, topic_shares, parsed):
        settings = Settings(shape, dropout, steps, context, batch, lr, weight_decay, share, seed, device)
        pace = max((t.seconds / t.settings.steps for t in tried), default=0.0)
        if time.monotonic() - begun + pace * steps > seconds:
            click.echo(f"skipped for lack of time: {settings}", err=True)
            continue
        run = train(kind, settings, tokenizers[shape.vocabulary], corpus)
        tried.append(run)
        click.echo(
            f"{settings}: validation {run.validation_bits:.4f} bits/byte at step {run.best_step}, {run.seconds:.0f} s"
        )
    best = min(tried, key=lambda t: t.validation_bits)
    save(best, output)
    model = AutoModelForCausalLM.from_pretrained(output, dtype=torch.float32).to(device)
    parameters = sum(weight.numel() for weight in model.parameters())
    rows = results(model, best.tokenizer, corpus)
    (output / "README.md").write_text(model_card(kind, best, tried, rows, corpus, parameters), encoding="utf-8")
    size = sum(path.stat().st_size for path in output.iterdir())
    click.echo(table_text(rows))
    click.echo(
        f"kept {best.settings}, seed {seed}: "
        f"{parameters:,} parameters, {size:,} bytes, {time.monotonic() - begun:.0f} s"
    )
    if size > LARGEST_FOLDER:
        raise click.ClickException(
            f"{output}: {size:,} bytes, expected at most {LARGEST_FOLDER:,}; make --shape smaller"
        )
