"""Issue 35, lane T2: where calibrate's time goes, by CUPTI's timeline and by what the main thread stands at; site_counts old and new.
All in one process. WORK, TEXT, LOG as T1. t3.py [--device cpu]"""

import collections
import hashlib
import json
import os
import shutil
import sys
import threading
import time
import traceback
from dataclasses import replace
from pathlib import Path

sys.path[:0] = ["benchmarks", ".lease/lanes"]
import torch

DEVICE = "cpu" if "--device" in sys.argv else "cuda"
WORK, TEXT, LOG = Path(os.environ["WORK"]), os.environ["TEXT"], Path(os.environ.get("LOG", "/tmp/log"))
SAMPLES, CONTEXT = int(os.environ.get("SAMPLES", 128)), int(os.environ.get("CONTEXT", 2048))
SMALL, BIG = os.environ.get("SMALL", "8b:4"), os.environ.get("BIG", "8b:32")
LIMIT = float(os.environ.get("LIMIT", 120))
T0 = time.perf_counter()


def say(*what):
    print(f"[{time.perf_counter() - T0:5.1f}]", *what, flush=True)


def left():
    return LIMIT - (time.perf_counter() - T0)


from many_workers import made_shape

from sparsepack.calibration import run
from sparsepack.calibration.collectors import kernels, residual
from sparsepack.calibration.options import CalibrateOptions
from sparsepack.calibration.samples import at_once
from sparsepack.models.checkpoint.checkpoint import open_checkpoint
from sparsepack.models.stock import bound
from sparsepack.models.stock.parts import OWN_CODE

say("imported")
HUGE = os.environ.get("HUGE", "70b:5")
if sys.argv[1] == "make":
    for name, shape in (("big", BIG), ("huge", HUGE)):
        made_shape(f"shape:{shape}", WORK, DEVICE)
        (WORK / f"made-{name}").touch()
        say(f"made {shape}")
    sys.exit()
if DEVICE == "cuda":
    import t1_counts

    t1_counts.names()  # before any kernel's source is read

chosen, cache = run.chosen_windows, {}
run.chosen_windows = lambda checkpoint, text, options: (
    cache.setdefault(options.samples, None)
    if cache.get(options.samples) is not None
    else cache.__setitem__(options.samples, chosen(checkpoint, text, options)) or cache[options.samples]
)
bound.EVERY = 0.0
told, line = [], bound.bound_line


def kept(seconds, *rest):
    told[:] = [seconds, line(seconds, *rest)]
    return told[1]


bound.bound_line = kept
recorded_functions = [0]
if DEVICE == "cuda":
    from sparsepack.runtime.cuda.driver import graph

    call = graph.Recorder.__call__

    def counted_call(self, run):
        recorded_functions[0] += 1
        began = time.perf_counter()
        made = call(self, run)
        recording.append(time.perf_counter() - began)
        return made

    graph.Recorder.__call__ = counted_call
recording = []
# Stock code asks the GPU whether positions are of several texts in a row, for each batch (it waits there), and does not skip a
# causal mask while a run is recorded (transformers before 5.2x): attention takes another kernel then.
from transformers import masking_utils

STOCK = {name: getattr(masking_utils, name) for name in ("find_packed_sequence_indices", "is_tracing")}


heads_of, heads_cached = (
    getattr(run, "heads_of_config", None),
    [],
)  # it makes the whole stock model on the meta device, once a block


def cached_heads(config):
    if not heads_cached:
        heads_cached.append(heads_of(config))
    return heads_cached[0]


def masks(quick):
    run.heads_of_config = cached_heads if quick else heads_of
    heads_cached.clear()
    masking_utils.find_packed_sequence_indices = (
        (lambda position_ids: None) if quick else STOCK["find_packed_sequence_indices"]
    )
    masking_utils.is_tracing = (lambda tensor=None: False) if quick else STOCK["is_tracing"]


def waits(name):
    """Where the main thread waits for the GPU, by torch's warnings."""
    import warnings

    seen = collections.Counter()

    def show(message, *rest, **k):
        if "synchroniz" not in str(message):
            return
        stack = [f for f in traceback.extract_stack() if "/sparsepack/" in f.filename or "/transformers/" in f.filename]
        seen[
            " < ".join(f"{'/'.join(f.filename.split('/')[-2:])}:{f.lineno}" for f in stack[-1:-4:-1]),
            threading.current_thread().name[:12],
        ] += 1

    before, warnings.showwarning = warnings.showwarning, show
    warnings.simplefilter("always")
    torch.cuda.set_sync_debug_mode("warn")
    try:
        calibrated(checkpoint, "waits", replace(options, samples=min(SAMPLES, 4 * batch)))
    finally:
        torch.cuda.set_sync_debug_mode("default")
        warnings.showwarning = before
        warnings.resetwarnings()
    say(f"WAITS {name}, 4 batches, {checkpoint.layers} blocks:")
    for (where, thread), n in seen.most_common(14):
        print(f"   {n:4d} {thread} {where}")


load = run.BlockStream.load
loads = []


def timed_load(self, *a, **k):
    began = time.perf_counter()
    load(self, *a, **k)
    loads.append(time.perf_counter() - began)


run.BlockStream.load = timed_load


class Sampler(threading.Thread):
    """Where the main thread stands, every 2 ms."""

    def __init__(self):
        super().__init__(daemon=True)
        self.main, self.on, self.lines, self.leaves = (
            threading.main_thread().ident,
            True,
            collections.Counter(),
            collections.Counter(),
        )

    def run(self):
        while self.on:
            frame = sys._current_frames().get(self.main)
            if frame is not None:
                leaf, inner, outer = frame, None, None
                while frame is not None:
                    name = frame.f_code.co_filename
                    if "/sparsepack/" in name and "t3.py" not in name:
                        inner = inner or frame
                        if name.endswith("calibration/run.py"):
                            outer = frame
                            if frame.f_code.co_name == "count_block":
                                break
                    frame = frame.f_back
                show = lambda f: (
                    "-"
                    if f is None
                    else f"{'/'.join(f.f_code.co_filename.split('/')[-2:])}:{f.f_lineno} {f.f_code.co_name}"
                )
                self.lines[f"{show(outer)} > {show(inner)} > {show(leaf)}"] += 1
            time.sleep(0.002)


def digest(path):
    return {f.name: hashlib.sha256(f.read_bytes()).hexdigest()[:12] for f in sorted(path.iterdir()) if f.is_file()}


def calibrated(model, name, options):
    recording.clear()
    loads.clear()
    recorded_functions[0] = 0
    began = time.perf_counter()
    run.calibrate(model, TEXT, WORK / name, options, overwrite=True)
    whole = time.perf_counter() - began
    found = digest(WORK / name)
    shutil.rmtree(WORK / name)
    return whole, told[0], found


KINDS = [
    ("turn_heads",) * 2,
    ("silu_times",) * 2,
    ("norm_rows",) * 2,
    ("site_counts",) * 2,
    ("head_sums",) * 2,
    ("nvjet", "products"),
    ("gemm", "products"),
    ("xmma", "products"),
    ("cutlass", "products"),
    ("flash", "attention"),
    ("fmha", "attention"),
    ("cudnn", "attention"),
    ("Memcpy HtoD", "HtoD"),
    ("Memcpy DtoH", "DtoH"),
    ("Memcpy DtoD", "DtoD"),
    ("Memset", "fills"),
    ("FillFunctor", "fills"),
    ("norm", "norms of torch"),
    ("silu", "silu of torch"),
    ("Cat", "cat"),
    ("copy", "copies by kernel"),
    ("reduce", "reductions"),
    ("scan", "scan"),
    ("elementwise", "elementwise"),
]


def profiled(name, options, blocks):
    from torch.profiler import ProfilerActivity, profile

    path = LOG / f"T3-trace-{name}.json"
    sampler = Sampler()
    with profile(activities=[ProfilerActivity.CUDA if DEVICE == "cuda" else ProfilerActivity.CPU]) as prof:
        sampler.start()
        calibrated(checkpoint, "profiled", options)
        sampler.on = False
        if DEVICE == "cuda":
            torch.cuda.synchronize()
    prof.export_chrome_trace(str(path))
    events = json.loads(path.read_text())["traceEvents"]
    path.unlink()
    batches = blocks * (options.samples // options.batch)
    gpu = sorted((e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")), key=lambda e: e["ts"])
    host = [e for e in events if e.get("cat") in ("cuda_runtime", "cuda_driver")]
    with open(LOG / f"T3-{name}.txt", "w") as f:
        f.write("main thread, samples of 2 ms and more:\n")
        for where, n in sampler.lines.most_common(45):
            f.write(f"{n:6d}  {where}\n")
        apis = collections.defaultdict(lambda: [0, 0.0])
        for e in host:
            apis[e["name"], e.get("tid")][0] += 1
            apis[e["name"], e.get("tid")][1] += e.get("dur", 0)
        f.write("host calls, ms in all:\n")
        for (what, tid), (n, us) in sorted(apis.items(), key=lambda x: -x[1][1])[:25]:
            f.write(f"{us / 1e3:9.1f} ms {n:6d} times  {what}  thread {tid}\n")
        if not gpu:
            return say("no GPU events", [e.get("cat") for e in events[:5]])
        sums = collections.defaultdict(lambda: [0, 0.0])
        by = collections.Counter()
        streams = collections.Counter()
        for e in gpu:
            sums[e["name"]][0] += 1
            sums[e["name"]][1] += e["dur"]
            by[next((to for what, to in KINDS if what in e["name"]), "else")] += e["dur"]
            streams[e.get("args", {}).get("stream")] += e["dur"]
        main = streams.most_common(1)[0][0]
        # Gaps: between kernels, from the first site_counts to the last, copies to and from the host left out.
        work = [e for e in gpu if "HtoD" not in e["name"] and "DtoH" not in e["name"]]
        inside = [i for i, e in enumerate(work) if "site_counts" in e["name"]]
        work = work[inside[0] : inside[-1] + 1] if inside else work
        end, busy, gaps, before = work[0]["ts"], 0.0, [], None
        for e in work:
            if e["ts"] > end:
                gaps.append((e["ts"] - end, (end - work[0]["ts"]) / 1e3, before, e["name"][:60]))
            busy += max(0.0, e["ts"] + e["dur"] - max(end, e["ts"]))
            if e["ts"] + e["dur"] > end:
                end, before = e["ts"] + e["dur"], e["name"][:60]
        span = end - work[0]["ts"]
        say(
            f"PROFILE {name}: span {span / 1e3:.0f} ms, busy {busy / 1e3:.0f} ms ({busy / span:.0%}); a batch and block of {options.batch * CONTEXT} tokens: "
            f"span {span / 1e3 / batches:.2f}, busy {busy / 1e3 / batches:.2f} ms; streams {dict(streams.most_common(4))}"
        )
        for low, high in ((0, 5), (5, 20), (20, 100), (100, 1e3), (1e3, 1e4), (1e4, 1e9)):
            these = [g[0] for g in gaps if low <= g[0] < high]
            print(
                f"   gaps {low:6.0f} to {high:.0f} us: {len(these)}, {sum(these) / 1e3:.1f} ms, {sum(these) / 1e3 / batches:.2f} a batch and block"
            )
        for kind, us in by.most_common():
            print(f"   {kind:20s} {us / 1e3 / batches:7.3f} ms")
        f.write("largest gaps: ms, at ms, after, before\n")
        for gap, at, a, b in sorted(gaps, reverse=True, key=lambda g: g[0])[:40]:
            f.write(f"{gap / 1e3:8.2f} at {at:9.1f}  {a}  ->  {b}\n")
        f.write("GPU, ms a batch and block:\n")
        for what, (n, us) in sorted(sums.items(), key=lambda x: -x[1][1])[:60]:
            f.write(f"{us / 1e3 / batches:8.4f} ms {n / batches:7.2f} times {us / n:9.1f} us each  {what[:150]}\n")
    lines = (LOG / f"T3-{name}.txt").read_text().splitlines()
    print("\n".join(lines[:14]))
    print("\n".join(lines[lines.index("host calls, ms in all:") :][:12]))


def step(what, function, *arguments):
    try:
        return function(*arguments)
    except Exception:
        traceback.print_exc()
        say(f"{what}: FAILED")


model = made_shape(f"shape:{SMALL}", WORK, DEVICE)
checkpoint = open_checkpoint(model)
say(f"made {SMALL}")
batch = at_once(None, SAMPLES, CONTEXT, DEVICE)
options = CalibrateOptions(samples=SAMPLES, context=CONTEXT, batch=batch, device=DEVICE)
every = kernels.parts_on(torch.device("cuda", 0)) if DEVICE == "cuda" else OWN_CODE
old_count = None
if DEVICE == "cuda":
    from sparsepack.runtime.cuda import calibration

    step("compile", t1_counts.compile_all)
    say("compiled")
    old_count = calibration.count_site
    step("counts", t1_counts.compared, say)
    say("counts done")


def use(parts, records, new=False):
    kernels.RECORDS = records
    run.parts_on = residual.parts_on = lambda _: parts
    if old_count is not None:
        calibration.count_site = t1_counts.count_site_new if new else old_count


def variant(name, parts, records, new=False, quick=False):
    use(parts, records, new)
    masks(quick)
    calibrated(checkpoint, "warm", replace(options, samples=min(SAMPLES, 3 * batch)))
    whole, blocks, found = calibrated(checkpoint, name, options)
    say(
        f"VARIANT {name}: blocks {blocks:.2f} s, {blocks / checkpoint.layers / (SAMPLES / batch) * 1e3:.1f} ms a batch and block; calibrate {whole:.1f}; loads "
        f"{[round(s, 3) for s in loads]}, recordings {recorded_functions[0]} {[round(s, 3) for s in recording]}; {told[1][-150:]}"
    )
    return found


found = {}
for name, parts, records, new, quick in (
    ("masks", every, False, False, True),
    ("recorded-masks", every, True, False, True),
    ("recorded-masks-counts", every, True, True, True),
):
    if left() > 30:
        found[name] = step(name, variant, name, parts, records, new, quick)
say(
    {name: ("-" if f is None else "SAME" if f == found.get("masks") else "OTHER") for name, f in found.items()},
    "as masks",
)


def product_rate_of(big):
    if DEVICE == "cpu":
        return 1e11
    from calibrate_bound import product_rate

    rate = product_rate(big)
    torch.cuda.empty_cache()
    return rate


def whole(name, shape, new, records):
    end = time.time() + max(0, left() - 25)
    while not (WORK / f"made-{name}").exists() and time.time() < end:
        time.sleep(0.2)
    if not (WORK / f"made-{name}").exists():
        return say(f"{shape}: not made in time")
    masks(True)
    use(every, records, new)
    from calibrate_bound import BLOCKS

    big = open_checkpoint(made_shape(f"shape:{shape}", WORK, DEVICE))
    rate = product_rate_of(big)
    least = 2 * bound.weights_of_block(big) * big.layers * SAMPLES * CONTEXT / rate
    here = replace(options, batch=at_once(None, SAMPLES, CONTEXT, DEVICE))
    sampler = Sampler()
    sampler.start()
    taken, blocks, found = calibrated(big, "whole", here)
    sampler.on = False
    times = BLOCKS.get(shape.split(":")[0], big.layers) / big.layers
    say(
        f"WHOLE {shape} recorded {records}, new counts {new}: calibrate {taken:.1f} (tokenised before), blocks {blocks:.2f} s, products alone {least:.2f} s at {rate / 1e12:.0f} TFLOP/s: "
        f"{least / blocks:.0%}; all blocks of the model (computed) {blocks * times:.0f} s; loads {sum(loads):.2f} s, recordings {sum(recording):.2f} s; {told[1]}"
    )
    for where, n in sampler.lines.most_common(9):
        print(f"{n:6d}  {where}")
    return found


right = DEVICE == "cuda" and "SAME" in t1_counts.RESULT
one = step("whole", whole, "big", BIG, right, True)
if DEVICE == "cuda" and left() > 40:
    use(every, False)
    masks(True)
    step("waits", waits, "with masks")
if left() > 26:
    step("huge", whole, "huge", HUGE, right, True)
if left() > 24:
    other = step("whole", whole, "big", BIG, False, False)
    say("SAME" if one == other else "OTHER", "8B recorded and new counts, and neither")
if DEVICE == "cuda":
    t1_counts.remove()
