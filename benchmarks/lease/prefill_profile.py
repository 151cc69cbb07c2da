"""Where a mixture's prefill spends its time: 6 layers of Qwen3-30B-A3B under clocks, torch's profiler and cProfile."""

import cProfile
import io
import pstats
import statistics
import sys
import time

sys.path.insert(0, "benchmarks")
import torch
from cuda_families import random_model
from synthetic import random_ids

from sparsepack.runtime.cuda.products import zigzag
from sparsepack.runtime.engine import Engine

out = open(sys.argv[1], "w")


def say(*a):
    print(*a, file=out, flush=True)


LAYERS = 6


def micro():
    """Microseconds of the host for what prefill calls."""
    from sparsepack.runtime.cuda.products import gemm_fp16 as g

    x = torch.randn(128, 2304, device="cuda")
    w = torch.randn(2304, 2304, device="cuda").half()
    h = x.half()
    o = torch.empty(128, 2304, device="cuda")
    n = torch.arange(64, device="cuda")
    ways = {
        "torch.empty": lambda: torch.empty(128, 2304, device="cuda"),
        "mm": lambda: torch.mm(h, w, out_dtype=torch.float32, out=o),
        "add_": lambda: o.add_(1),
        "index": lambda: h[n],
        "to_scaled_fp16": lambda: g.to_scaled_fp16(x),
        "current_stream": lambda: torch.cuda.current_stream(0).cuda_stream,
        "python loop of 1000": lambda: sum(range(1000)),
        "sync alone": lambda: torch.cuda.synchronize(),
    }
    for name, way in ways.items():
        for _ in range(20):
            way()
        torch.cuda.synchronize()
        s = time.perf_counter()
        for _ in range(300):
            way()
        host = (time.perf_counter() - s) / 300
        torch.cuda.synchronize()
        whole = (time.perf_counter() - s) / 300
        say(f"micro {name}: host {host * 1e6:.1f} us, with the GPU {whole * 1e6:.1f} us")


micro()
import os

say(
    "cpu MHz",
    [l.split(":")[1].strip() for l in open("/proc/cpuinfo") if "MHz" in l][:2],
    "load",
    os.getloadavg(),
    "OMP",
    os.environ.get("OMP_NUM_THREADS"),
)


def dense():
    packed = random_model("gemma-2-2b", LAYERS)
    ids = random_ids(packed.architecture.vocabulary, 512, seed=4)
    engine = Engine(packed, device="cuda", context=4096)
    for n in (128, 512):
        taken = []
        for _ in range(8):
            engine.reset()
            torch.cuda.synchronize()
            s = time.perf_counter()
            engine.prefill(ids[:n])
            mid = time.perf_counter()
            torch.cuda.synchronize()
            taken.append((time.perf_counter() - s, mid - s))
        say(
            f"gemma-2-2b {n}: {statistics.median(t for t, _ in taken[2:]) / LAYERS * 1e3:.2f} ms a layer, until prefill returned {statistics.median(t for _, t in taken[2:]) / LAYERS * 1e3:.2f}"
        )
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    ) as prof:
        engine.reset()
        engine.prefill(ids[:128])
        torch.cuda.synchronize()
    rows = [e for e in prof.key_averages() if e.device_type == torch.autograd.DeviceType.CUDA]
    say(
        f"-- gemma, 128 tokens: GPU busy {sum(e.self_device_time_total for e in rows) / LAYERS / 1e3:.2f} ms a layer, {sum(e.count for e in rows) / LAYERS:.0f} kernels a layer"
    )
    for e in sorted(rows, key=lambda e: -e.self_device_time_total)[:12]:
        say(f"   {e.self_device_time_total / LAYERS:8.1f} us {e.count / LAYERS:5.1f}x {e.key[:90]}")
    for e in sorted(
        (e for e in prof.key_averages() if e.device_type == torch.autograd.DeviceType.CPU),
        key=lambda e: -e.self_cpu_time_total,
    )[:12]:
        say(f"   host {e.self_cpu_time_total / LAYERS:8.1f} us {e.count / LAYERS:5.1f}x {e.key[:70]}")
    pr = cProfile.Profile()
    engine.reset()
    pr.enable()
    engine.prefill(ids[:128])
    torch.cuda.synchronize()
    pr.disable()
    text = io.StringIO()
    pstats.Stats(pr, stream=text).sort_stats("tottime").print_stats(22)
    say(text.getvalue()[:4500])


dense()
packed = random_model("qwen3-30b-a3b", LAYERS)
ids = random_ids(packed.architecture.vocabulary, 2048, seed=4)


def walls(engine, n, rounds=5):
    taken = []
    for _ in range(rounds + 2):
        engine.reset()
        torch.cuda.synchronize()
        s = time.perf_counter()
        engine.prefill(ids[:n])
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - s)
    return statistics.median(taken[2:]) / LAYERS * 1e3


for room in (1 << 28, 1 << 30):
    zigzag.SCRATCH_BYTES = room
    try:
        import sparsepack.runtime.cuda.decoder.prefill as p

        if hasattr(p, "SCRATCH_BYTES"):
            p.SCRATCH_BYTES = room
    except Exception as e:
        say(e)
    engine = Engine(packed, device="cuda", context=4096)
    say(
        f"scratch of at least {room >> 20} MB:",
        ", ".join(f"{n}: {walls(engine, n):.2f} ms a layer" for n in (128, 512, 2048)),
    )
    for n in (128, 2048):
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
        ) as prof:
            engine.reset()
            engine.prefill(ids[:n])
            torch.cuda.synchronize()
        rows = [e for e in prof.key_averages() if e.device_type == torch.autograd.DeviceType.CUDA]
        gpu = sum(e.self_device_time_total for e in rows)
        count = sum(e.count for e in rows)
        say(f"-- {n} tokens: GPU busy {gpu / LAYERS / 1e3:.2f} ms a layer, {count / LAYERS:.0f} kernels a layer")
        for e in sorted(rows, key=lambda e: -e.self_device_time_total)[:14]:
            say(f"   {e.self_device_time_total / LAYERS:8.1f} us {e.count / LAYERS:5.1f}x {e.key[:90]}")
        if n == 128:
            host = [e for e in prof.key_averages() if e.device_type == torch.autograd.DeviceType.CPU]
            for e in sorted(host, key=lambda e: -e.self_cpu_time_total)[:16]:
                say(f"   host {e.self_cpu_time_total / LAYERS:8.1f} us {e.count / LAYERS:5.1f}x {e.key[:70]}")
    if room > 1 << 28:
        pr = cProfile.Profile()
        engine.reset()
        pr.enable()
        engine.prefill(ids[:128])
        torch.cuda.synchronize()
        pr.disable()
        text = io.StringIO()
        pstats.Stats(pr, stream=text).sort_stats("tottime").print_stats(22)
        say(text.getvalue()[:5000])
    del engine
