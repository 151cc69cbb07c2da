"""Measure prefill and decoding of an artifact, dense and sparse in turns, with one engine; and count the bytes that a
token reads."""

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Any

import torch
from torch import Tensor

from sparsepack.bench.bandwidth import bandwidth_of
from sparsepack.bench.energy import EnergyMeter, energy_meter
from sparsepack.bench.options import BenchSettings
from sparsepack.errors import UserError
from sparsepack.formats.packed import PackedModel, skipped_weights
from sparsepack.placement.traffic import HitCounts, TrafficStats, describe_per_token, per_token
from sparsepack.progress import progress, say
from sparsepack.runtime.backends import find_backend
from sparsepack.runtime.chained.decoder import torch_threads
from sparsepack.runtime.cpu.machine import cpu_info, processors
from sparsepack.runtime.decoder import load_backend_module
from sparsepack.runtime.engine import Engine
from sparsepack.runtime.features import requested_backend
from sparsepack.version import __version__

Activity = Mapping[tuple[int, str], float]
"""The share of active columns, or of active records, stands under (layer, site), as `Engine.activity` returns it; a
site that is not named is wholly active."""


def parameters(packed: PackedModel) -> int:
    """The model's parameters: logical weights, norms and biases; a tied output matrix counts once."""
    matrices = [packed.embedding] + ([] if packed.architecture.tied else [packed.output])
    bias = 0 if packed.output_norm_bias is None else packed.output_norm_bias.numel()
    count = bias + packed.output_norm.numel() + sum(matrix.weights for matrix in [*matrices, *packed.bases.values()])
    if (inputs := packed.per_layer) is not None:
        count += inputs.embedding.weights + inputs.projection.weights + inputs.norm.numel()
    for layer in packed.layers:
        if (own := layer.per_layer) is not None:
            count += own.gate.weights + own.out.weights + own.norm.numel()
        count += sum(matrix.weights for matrix in layer.matrices.values())
        count += sum(tensor.numel() for tensor in layer.mlp.always)
        count += sum(norm.numel() for norm in layer.norms.values())
        count += sum(site.bias.numel() for site in layer.sites.values() if site.bias is not None)
    return count


def stored_bytes(packed: PackedModel) -> int:
    """Bytes of all stored tensors, padding rows included, metadata not."""
    embedding = 0 if packed.architecture.tied else packed.embedding.blocks.nbytes
    embedding += 0 if packed.per_layer is None else packed.per_layer.embedding.blocks.nbytes
    return (
        embedding
        + _always_read(packed)
        + sum(matrix.nbytes for layer in packed.layers for matrix in layer.matrices.values())
    )


def bytes_per_token(packed: PackedModel, activity: Activity, pads_tails: bool = False) -> float:
    """Stored bytes that decoding one token needs: active columns and records, of experts those that it has, the output
    matrix, one row of each embedding, changes of basis, norms, routers, biases, scales of rows and rules. The KV cache,
    which grows with the text, is left out.

    pads_tails -- as `Backend.pads_tails`: tails count as whole bands
    """
    blocks = sum(
        (matrix.padded_nbytes if pads_tails else matrix.nbytes)
        * layer.reached[name]
        * activity.get((number, name), 1.0)
        for number, layer in enumerate(packed.layers)
        for name, matrix in layer.matrices.items()
    )
    tables = [packed.embedding, *([] if packed.per_layer is None else [packed.per_layer.embedding])]
    row = sum(table.blocks.nbytes / table.rows for table in tables)
    return blocks + row + _always_read(packed)


def _always_read(packed: PackedModel) -> int:
    tensors: list[Tensor | None] = [packed.output.blocks, packed.output_norm, packed.output_norm_bias]
    tensors += [basis.blocks for basis in packed.bases.values()]
    if packed.per_layer is not None:
        tensors += [packed.per_layer.projection.blocks, packed.per_layer.norm]
    for layer in packed.layers:
        tensors += [*layer.norms.values(), *layer.always]
        for site in layer.sites.values():
            tensors += [site.bias, site.matrix.row_scale]
            if site.rule is not None:
                tensors += [site.rule.unit, site.rule.steps, site.rule.offset]
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


SCHEMA = 1
CHECKED_TOKENS = 9
LARGEST_DIFFERENCE, SPARSE_DIFFERENCE = 0.02, 0.1
"""The logits of two ways to the same output differ by at most this share. Dense ones differ by rounding only. Sparse
ones do by more where an input lies so close to its threshold that rounding decides: by 0.02 after one step of a model
with half of its weights skipped, where each way is as far from the reference backend as from the other."""


@dataclass(frozen=True)
class _Test:
    name: str
    mode: str  # "dense" or "sparse"
    n_prompt: int
    n_gen: int


def bench_decode(
    packed: PackedModel, settings: BenchSettings, filename: str = "", ids: Sequence[int] | None = None
) -> dict[str, Any]:
    """Measure an artifact. Returns a JSON-able dict; `tests` holds a row per test, with llama-bench's keys where
    those exist: `n_prompt`, `n_gen`, `samples_ns`, `avg_ts` (tokens a second), `stddev_ts`, `model_size` (bytes)...

    ids -- tokens to run instead of random ones. How much is skipped depends on them: random ids are no text

    Prefill is dense by definition. Dense and sparse decoding take turns on the same engine, after a check that steps
    give the logits of the same text at once; its result is in `check`. Sequences of a batch have texts of their own,
    pieces of `ids` one after the other, and their rows count the tokens of all. Rows of decoding tests also have
    `bytes_per_token` (stored bytes needed, see `bytes_per_token`), `realised_sparsity` (share of the block
    weights skipped), the same `_of_sparse_sites`, `bits_read` of a weight with planes, `skipped_in_words`,
    and `bandwidth_share` (bytes_per_token * avg_ts over the memory's
    bandwidth, see `bandwidth.bandwidth_of`). Rows have `tokens_per_joule`, None where nothing counts energy
    (`energy.energy_meter`). Where neurons have slots, `served` has how many did of those that were
    active, and of sparse ones `per_token` what a token took (`placement.traffic.per_token`), in the last repetition.

    Raises `UserError` for a text shorter than a test or a test longer than the model's context.
    """
    tests, notes = _tests(packed, settings)
    longest, needed = settings.longest, settings.tokens
    if ids is not None and len(ids) < needed:
        raise UserError(f"text of {len(ids)} tokens: the tests take {needed}; give a longer text or fewer tokens")
    texts = [
        _tokens(packed, settings.seed + n, longest) if ids is None else list(ids[n * longest : (n + 1) * longest])
        for n in range(settings.batch)
    ]
    modes = list(dict.fromkeys(test.mode for test in tests))
    with torch_threads(settings.engine.threads):
        expected = None
        if settings.batch > 1:  # a text at once is for an engine of one, which ends before that of several begins
            runs = requested_backend(replace(settings.engine, sequences=settings.batch)).name
            context = min(CHECKED_TOKENS, longest)
            expected = _expected(Engine(packed, settings.engine, context=context, backend=runs), modes, texts[0])
        engine = Engine(packed, settings.engine, context=longest, sequences=settings.batch)
        say(f"runtime: {engine.description}", *engine.notes)
        expected = expected or _expected(engine, modes, texts[0])
        check = {mode: _difference(engine, mode, texts[0], expected[mode]) for mode in modes}
        meter = energy_meter(engine.device)
        samples, joules, activities, served = _measured(engine, tests, texts, settings.repetitions, meter)
        with torch_threads(engine.threads):
            memory = bandwidth_of(engine.device)
        bandwidth = memory.bytes_per_second
        rows = [
            _row(packed, engine, settings, filename, t, samples[t], joules.get(t), activities[t], bandwidth)
            for t in tests
        ]
    for test, row in zip(tests, rows, strict=True):
        if (of_test := served.get(test)) is not None:
            hits, ways = of_test
            said = [] if hits is None else [hits.in_words]
            row["served"] = None if hits is None else hits.to_json()
            if test.mode == "sparse":
                row["per_token"] = per_token(ways, row["median_ns"] / 1e9 / test.n_gen)
                said.append(describe_per_token(row["per_token"]))
            if not said:
                continue
            note = f"{test.name}, {test.mode}: {'; '.join(said)}"
            if settings.batch > 1:
                note += f"; a step of {settings.batch} sequences counts as one token"
            notes.append(note)
    return {
        "schema": SCHEMA,
        "runtime": f"runtime: {engine.description}: {find_backend(engine.backend).says}",
        "tokens": f"random, seed {settings.seed}" if ids is None else "given",
        "check": check,
        "read_bandwidth": asdict(memory),
        "energy": meter and meter.how,
        "processors": str(processors()),
        "notes": [*engine.notes, *notes],
        "tests": rows,
    }


def _tests(packed: PackedModel, settings: BenchSettings) -> tuple[list[_Test], list[str]]:
    tests, notes = [], []
    if settings.batch == 1 and settings.prompt:
        tests.append(_Test(f"pp{settings.prompt}", "dense", settings.prompt, 0))
    if settings.generate:
        name = f"tg{settings.generate}" + (f" x {settings.batch}" if settings.batch > 1 else "")
        tests.append(_Test(name, "dense", 0, settings.generate))
        if packed.skips:
            tests.append(_Test(name, "sparse", 0, settings.generate))
        else:
            notes.append(
                "this artifact has neither thresholds nor sparse attention: there is no sparse decoding to measure"
            )
    if packed.attention:
        first = packed.attention.policy.min_context
        short = f"; here at most {settings.generate:,} are there, and all are read" if settings.generate < first else ""
        notes.append(f"attention is sparse where {first:,} tokens or more are there{short}")
    return tests, notes


def _tokens(packed: PackedModel, seed: int, count: int) -> list[int]:
    """Random ids, BOS first where the model has one."""
    generator = torch.Generator().manual_seed(seed)
    tokens: list[int] = torch.randint(packed.architecture.vocabulary, (count,), generator=generator).tolist()
    bos = packed.architecture.bos
    return tokens if bos is None else [bos, *tokens[1:]]


def _expected(engine: Engine, modes: Sequence[str], tokens: Sequence[int]) -> dict[str, list[torch.Tensor]]:
    """By mode, the logits after a step behind prompts of several lengths, by an engine that takes all at once."""
    lengths = range(min(CHECKED_TOKENS, engine.context))
    found: dict[str, list[torch.Tensor]] = {}
    for mode in modes:
        engine.dense = mode == "dense"
        found[mode] = [engine.teacher_forced(tokens[: n + 1], n + engine.dense)[-1] for n in lengths]
    return found


def _difference(engine: Engine, mode: str, tokens: Sequence[int], expected: Sequence[torch.Tensor]) -> float:
    """How far the logits of a step are from those of the same text at once: the timed path computes the real thing.

    Relative, the median over steps after prompts of several lengths; one step each, since a chance difference at a
    threshold would grow with every further one. All sequences have one text: what is active in any of them is active
    in that text. Raises UserError where the difference is too large.
    """
    engine.dense = mode == "dense"
    differences = []
    for length, logits in enumerate(expected):
        engine.reset()
        for sequence in range(len(engine.positions) if length else 0):
            engine.prefill(tokens[:length], sequence)
        found = engine.step_all([tokens[length]] * len(engine.positions))
        differences += [float(x) for x in (found - logits).norm(dim=1) / logits.norm()]
    difference = statistics.median(differences)
    largest = LARGEST_DIFFERENCE if engine.dense else SPARSE_DIFFERENCE
    if not difference <= largest:
        ties = "" if engine.dense else "; rounding decides where inputs lie near thresholds: pack with less skipped"
        raise UserError(
            f"backend {engine.backend}, {mode}: steps differ from the whole text at once by {difference:.3g} of the "
            f"logits, expected at most {largest}; not measured{ties}"
        )
    return difference


def _measured(
    engine: Engine,
    tests: Sequence[_Test],
    texts: Sequence[Sequence[int]],
    repetitions: int,
    meter: EnergyMeter | None,
) -> tuple[
    dict[_Test, list[int]],
    dict[_Test, float],
    dict[_Test, Activity],
    dict[_Test, tuple[HitCounts | None, TrafficStats]],
]:
    """Nanoseconds of every repetition, joules of all (with a meter), activity (the same in all), what slots served."""
    samples: dict[_Test, list[int]] = {test: [] for test in tests}
    joules: dict[_Test, float] = {}
    activities: dict[_Test, Activity] = {}
    served: dict[_Test, tuple[HitCounts | None, TrafficStats]] = {}
    if engine.device.type != "cpu":  # where a first run takes memory and loads what it runs
        for test in tests:
            _timed(engine, test, texts)
    with progress("bench", repetitions * len(tests)) as advance:
        for _ in range(repetitions):
            for test in tests:
                before = meter.read() if meter else ()
                samples[test].append(_timed(engine, test, texts))
                if meter:
                    joules[test] = joules.get(test, 0.0) + meter.joules(before)
                activities[test] = engine.activity()
                if test.n_gen and engine.traffic_stats is not None:
                    served[test] = engine.hit_counts, engine.traffic_stats
                advance()
    return samples, joules, activities, served


def _timed(engine: Engine, test: _Test, texts: Sequence[Sequence[int]]) -> int:
    """Nanoseconds of a test, which decodes a text in each of the engine's sequences."""
    steps = list(zip(*texts, strict=True))[: test.n_gen]
    engine.reset()
    engine.dense = test.mode == "dense"
    engine.synchronise()
    start = time.perf_counter_ns()
    if test.n_prompt:
        engine.prefill(texts[0][: test.n_prompt])
    for ids in steps:
        engine.step_all(ids)
    engine.synchronise()
    return time.perf_counter_ns() - start


def _row(
    packed: PackedModel,
    engine: Engine,
    settings: BenchSettings,
    filename: str,
    test: _Test,
    samples_ns: list[int],
    joules: float | None,
    activity: Activity,
    bandwidth: float,
) -> dict[str, Any]:
    tokens = settings.batch * (test.n_prompt + test.n_gen)
    samples_ts = [tokens * 1e9 / ns for ns in samples_ns]
    avg_ts = statistics.mean(samples_ts)
    row: dict[str, Any] = {
        "sparsepack_version": __version__,
        "cpu_info": cpu_info(),
        "gpu_info": load_backend_module(find_backend(engine.backend)).describe(engine.device),
        "backends": engine.backend,
        "model_filename": filename,
        "model_type": f"{packed.architecture.model_type} {packed.manifest['kind']}",
        "model_size": stored_bytes(packed),
        "model_n_params": parameters(packed),
        "n_threads": engine.threads,
        "type_k": engine.cache_type,
        "type_v": engine.cache_type,
        "n_prompt": test.n_prompt,
        "n_gen": test.n_gen,
        "n_batch": settings.batch,
        "n_depth": 0,
        "test_time": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "avg_ns": round(statistics.mean(samples_ns)),
        "median_ns": round(statistics.median(samples_ns)),
        "stddev_ns": round(_deviation(samples_ns)),
        "avg_ts": avg_ts,
        "stddev_ts": _deviation(samples_ts),
        "samples_ns": samples_ns,
        "samples_ts": samples_ts,
        "test": test.name,
        "mode": test.mode,
        "median_ts": statistics.median(samples_ts),
        "min_ts": min(samples_ts),
        "max_ts": max(samples_ts),
        "tokens_per_joule": tokens * len(samples_ns) / joules if joules else None,
        "bytes_per_token": None,
        "realised_sparsity": None,
        "realised_sparsity_of_sparse_sites": None,
        "bits_read": None,
        "skipped_in_words": None,
        "bandwidth_share": None,
    }
    if test.n_gen:
        pads_tails = find_backend(engine.backend).pads_tails
        needed = bytes_per_token(packed, activity, pads_tails) / settings.batch  # that tokens of a step share
        row["bytes_per_token"] = needed
        skipped = skipped_weights(packed, activity)
        row["realised_sparsity"] = skipped.overall
        row["realised_sparsity_of_sparse_sites"] = skipped.of_sparse_sites
        row["bits_read"] = packed.plane_bits and packed.plane_bits * (1 - skipped.overall)
        row["skipped_in_words"] = packed.describe_skipped(skipped, test.mode == "sparse")
        row["bandwidth_share"] = needed * avg_ts / bandwidth
    return row


def _deviation(samples: Sequence[float]) -> float:
    """The standard deviation of the sample, as llama-bench computes it; 0 for one value."""
    return statistics.stdev(samples) if len(samples) > 1 else 0.0
