"""`bench`: the speed of an artifact, of decoding or of the products of a slid folder, and its tables."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparsepack.bench.options import BenchSettings
from sparsepack.errors import UserError
from sparsepack.placement.traffic import describe_hits
from sparsepack.progress import format_count
from sparsepack.runtime.options import EngineOptions
from sparsepack.tables import Table, markdown

if TYPE_CHECKING:
    from sparsepack.formats.artifact import Artifact


def bench(path: Path, options: BenchSettings | None = None, text: str | None = None) -> dict[str, Any]:
    """Measure an artifact on the tokens of a text (None: random ones); see `bench_decode`, also for what it raises.

    Of a slid folder its products are measured, see `bench_linears`; raises `UserError` where a text is given, or a
    device that is no NVIDIA GPU.
    """
    # Reports import this module for its tables alone.
    from sparsepack.bench.decode import bench_decode
    from sparsepack.files.text import read_text
    from sparsepack.formats.open import open_artifact, read_packed
    from sparsepack.models.tokenizer.windows import first_tokens
    from sparsepack.runtime.generation.generate import open_tokenizer

    settings = options or BenchSettings()
    artifact = open_artifact(path)
    if artifact.format.weight_sparsity:
        return _bench_products(artifact, settings, text)
    if text and settings.seed != BenchSettings.seed:
        raise UserError(f"seed {settings.seed}: it does nothing with text {text}; leave one of them out")
    packed = read_packed(path)
    ids = None
    if text:
        tokenizer = open_tokenizer(packed.tokenizer_json)
        ids = first_tokens(tokenizer, read_text(text), settings.tokens, packed.architecture.vocabulary)
    return bench_decode(packed, settings, path.name, ids)


def _bench_products(artifact: "Artifact", settings: BenchSettings, text: str | None) -> dict[str, Any]:
    from sparsepack.bench.linears import PATTERNS, bench_linears, linears_of
    from sparsepack.formats.slide import Sparse24Artifact, value_type

    assert isinstance(artifact, Sparse24Artifact)
    if text is not None:
        raise UserError(f"{artifact.path}: the products of a slid folder take random inputs; leave --text out")
    if settings.engine.device.partition(":")[0] != "cuda":
        raise UserError(f"{artifact.path}: the products of a slid folder are timed on an NVIDIA GPU; add --device cuda")
    for name in ("prompt", "generate", "seed", "batch"):
        if (value := getattr(settings, name)) != getattr(BenchSettings, name):
            raise UserError(f"{artifact.path}: {name} {value} does nothing with a slid folder; leave it out")
    if settings.engine != EngineOptions(device=settings.engine.device):
        raise UserError(
            f"{artifact.path}: of what is said of the engine, the device alone counts with a slid folder; leave out "
            "backend, cached, vram, policy and threads"
        )
    shapes = {name: artifact.logical_shape(f"{name}.weight") for name in artifact.slides}
    patterns = sorted({*PATTERNS, *(how.pattern for how in artifact.slides.values())}, key=lambda p: (p.of, p.keep))
    linears = linears_of({name: (rows, columns) for name, (rows, columns) in shapes.items()})
    kinds = [*dict.fromkeys(("INT8", "FP8", value_type(artifact.format).kind))]
    return bench_linears(
        linears, patterns=patterns, rounds=settings.repetitions, device=settings.engine.device, kinds=kinds
    )


HEADER = (
    "model",
    "backend",
    "test",
    "sites",
    "size",
    "params",
    "threads",
    "t/s",
    "median (range)",
    "read/token",
    "skipped",
    "of bandwidth",
)


def bench_table(result: Mapping[str, Any]) -> str:
    """`bench_decode`'s result in the manner of llama-bench, and under it what the figures mean."""
    gigabytes = result["read_bandwidth"]["bytes_per_second"] / 1e9
    runs = format_count(len(result["tests"][0]["samples_ns"]), "run")
    energy = result.get("energy")
    notes = [
        result["runtime"],
        *([f"machine: {result['processors']}"] if "processors" in result else []),
        f"t/s: mean ± standard deviation of {runs}; tokens: {result['tokens']}",
        "read/token: stored bytes that a token needs; skipped: share of the block weights that it does not, or of a "
        "weight with planes the bits that it reads",
        f"bandwidth: {gigabytes:.1f} GB/s ({result['read_bandwidth']['how']}); its share: read/token * t/s",
        *([f"tokens/J: {energy}, with whatever else runs there"] if energy else []),
        *result["notes"],
    ]
    header, rows = [*HEADER], [_cells(row) for row in result["tests"]]
    if energy:
        header.append("tokens/J")
        for cells, row in zip(rows, result["tests"], strict=True):
            cells.append("-" if row["tokens_per_joule"] is None else f"{row['tokens_per_joule']:.2f}")
    return markdown(Table(header, rows, notes=["\n".join(notes)]))


def _cells(row: Mapping[str, Any]) -> list[str]:
    needed = row["bytes_per_token"]
    return [
        row["model_type"],
        row["backends"],
        row["test"],
        row["mode"],
        f"{row['model_size'] / 2**20:.2f} MiB",
        f"{row['model_n_params'] / 1e6:.2f} M",
        str(row["n_threads"]),
        f"{row['avg_ts']:.2f} ± {row['stddev_ts']:.2f}",
        _spread(row, 2),
        "-" if needed is None else f"{needed / 2**20:.2f} MiB",
        *_shares(row),
    ]


def _spread(row: Mapping[str, Any], digits: int) -> str:
    """Tokens a second: the median of the runs, the slowest and the fastest."""
    median, slowest, fastest = (f"{row[name]:.{digits}f}" for name in ("median_ts", "min_ts", "max_ts"))
    return f"{median} ({slowest} to {fastest})"


def _shares(row: Mapping[str, Any]) -> list[str]:
    skipped, share = row["skipped_in_words"], row["bandwidth_share"]
    return [
        "-" if skipped is None else skipped,
        "-" if share is None else f"{100 * share:.1f} %",
    ]


def speed_table(result: Mapping[str, Any]) -> Table:
    """`bench_decode`'s result in short, as a run, a card and a page show it."""
    rows = [
        [
            f"{'prefill' if row['n_prompt'] else 'decode'} of {row['n_prompt'] or row['n_gen']} tokens, {row['mode']}",
            f"{row['avg_ts']:.1f} ± {row['stddev_ts']:.1f}",
            _spread(row, 1),
            *_shares(row),
        ]
        for row in result["tests"]
    ]
    machines = {
        row["gpu_info"] or f"{row['cpu_info']}, {format_count(row['n_threads'], 'thread')}" for row in result["tests"]
    }
    hits = (describe_hits(row["served"]) for row in result["tests"] if "served" in row)
    runs = format_count(len(result["tests"][0]["samples_ts"]), "run")
    notes = [
        f"tokens/s: mean ± standard deviation of {runs}; {'; '.join(sorted(machines))}; {result['runtime']}",
        *dict.fromkeys(hits),
    ]
    return Table(["what", "tokens/s", "median (range)", "skipped", "of bandwidth"], rows, notes=notes)


def linears_table(result: Mapping[str, Any]) -> str:
    """`bench_linears`'s result: microseconds for each number of tokens, with the share of the GPU's bound; ratios."""
    found = {(r["tokens"], r["rows"], r["columns"], r["contender"]): r for r in result["products"]}
    names, linears = result["contenders"], result["linears"]
    parts: list[str | Table] = [f"{result['device']}; read bandwidth {result['read_bandwidth'] / 1e9:.0f} GB/s"]
    sums = {}
    for tokens in result["tokens"]:
        rows, seconds = [], dict.fromkeys(names, 0.0)
        for linear in linears:
            products = {name: found[tokens, linear["rows"], linear["columns"], name] for name in names}
            label = f"{linear['name']} {linear['rows']} x {linear['columns']}, {linear['count']} of them"
            rows.append([label, *map(_product, products.values())])
            for name, product in products.items():
                seconds[name] += linear["count"] * product["seconds"]
        sums[tokens] = seconds
        rows.append(["all of them", *(f"{taken * 1e6:.0f}" for taken in seconds.values())])
        parts.append(Table([f"{tokens} tokens, us (of the bound)", *names], rows))
    ratios = [
        [f"as dense {baseline}", tokens, *(f"{taken[baseline] / taken[name]:.2f}" for name in names)]
        for baseline in result["baselines"]
        for tokens, taken in sums.items()
    ]
    parts.append(Table(["times as fast, all of them", "tokens", *names], ratios))
    return markdown(*parts, "Quantising the inputs is included, and scaling the outputs where not said otherwise.")


def _product(product: Mapping[str, Any]) -> str:
    share = "" if product["share"] is None else f" ({product['share']:.0%})"
    return f"{product['seconds'] * 1e6:.1f}{share}"
