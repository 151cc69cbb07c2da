"""python time_verbs.py SECONDS WORK TEXT SHAPE CONTEXT STEP...: each verb by 1 and by 2 workers, seconds and bytes.

A STEP is verbs between commas; their runs by one worker go side by side, each on a GPU of its own (a lone verb is alone),
then each by two workers, alone; those that $M1_ONCE names run by one alone, for what they write. VERB:WINDOWS gives its
windows (global: steps). Outputs are compared in the background.
"""

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve()
sys.path.insert(0, str(HERE.parents[2] / "benchmarks"))
DEVICE = os.environ.get("M1_DEVICE", "cuda")

if sys.argv[1] == "one":  # WORKERS OUTPUT FLAG ARGUMENTS...
    from many_workers import run_once

    run = run_once(sys.argv[5:], Path(sys.argv[3]), sys.argv[4], int(sys.argv[2]), DEVICE, False)
    print("RUN " + json.dumps(vars(run)), flush=True)
    raise SystemExit

if sys.argv[1] == "make":  # SHAPE WORK
    from many_workers import made_shape

    began = time.perf_counter()
    print(
        made_shape(sys.argv[2], Path(sys.argv[3]), DEVICE), f"made in {time.perf_counter() - began:.1f} s", flush=True
    )
    raise SystemExit

began = time.monotonic()
SECONDS, WORK, TEXT, SHAPE, CONTEXT = float(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4], sys.argv[5]
OUT = Path(os.environ["LOG"]) / f"M1-{SHAPE.replace(':', '-')}.json"


def left():
    return SECONDS - (time.monotonic() - began)


(model,) = [
    str(p)
    for p in WORK.iterdir()
    if (p / "config.json").is_file()
    and p.name.endswith("-" + SHAPE.split(":")[2])
    and {"8b": "Llama-3-8B", "70b": "Llama-3-70B", "tiny": "llama-tiny"}[SHAPE.split(":")[1]] in p.name
]
made = WORK / f"made-{SHAPE.replace(':', '-')}"
made.mkdir(exist_ok=True)
FLAGS = {"pack": ("-o", ".gguf"), "eval": ("--json", ".json")}


def output(verb, count):
    return made / f"{verb}-{count}{FLAGS.get(verb, ('', ''))[1]}"


def arguments(verb, many):
    cal, table = str(output("calibrate", 1)), str(output("thresholds", 1))
    return {
        "calibrate": ["calibrate", model, "--text", TEXT, "--samples", many, "--context", CONTEXT],
        "thresholds": ["thresholds", model, "--calibration", cal, "--sparsity", "0.5", "--windows", many],
        "teal": [
            "thresholds",
            model,
            "--calibration",
            cal,
            "--sparsity",
            "0.5",
            "--allocation",
            "teal",
            "--windows",
            many,
        ],
        "global": [
            "thresholds",
            model,
            "--calibration",
            cal,
            "--sparsity",
            "0.5",
            "--allocation",
            "global",
            "--steps",
            many,
            "--batch",
            "4",
            "--length",
            CONTEXT,
        ],
        "prune": ["prune", model, "--keep", "6", "--of", "8", "--calibration", cal, "--windows", many],
        "rotate": ["rotate", model, "--calibration", cal],
        "pack": ["pack", model, "--thresholds", table],
        "eval": ["eval", model, "--thresholds", table, "--perplexity", TEXT, "--windows", many, "--context", CONTEXT],
    }[verb]


def one(verb, many, count, gpu, beside):
    environment = dict(os.environ)
    if DEVICE == "cuda":
        environment["CUDA_VISIBLE_DEVICES"] = gpu
    seconds = min(left() - 2, float(os.environ.get("M1_CAP", "60")))
    if seconds < 8:
        return None
    done = subprocess.run(
        [
            sys.executable,
            str(HERE.parents[1] / "limited.py"),
            f"{seconds:.0f}",
            sys.executable,
            str(HERE),
            "one",
            str(count),
            str(output(verb, count)),
            FLAGS.get(verb, ("-o", ""))[0],
            *arguments(verb, many),
        ],
        env=environment,
        capture_output=True,
        text=True,
    )
    said = [line for line in done.stdout.splitlines() if line.startswith("RUN ")]
    if not said:
        print(
            f"!! {verb} by {count}: {(done.stderr.strip().splitlines() or [''])[-1][-300:]} {done.stdout[-200:]}",
            flush=True,
        )
        return None
    run = json.loads(said[0][4:])
    run["beside"] = beside
    del run["content"]
    return run


def same(verb):
    a, b = output(verb, 1), output(verb, 2)
    done = subprocess.run(["diff", "-rq", str(a), str(b)], capture_output=True, text=True)
    if verb not in ("calibrate", "thresholds"):
        subprocess.run(["rm", "-rf", str(a)])
    subprocess.run(["rm", "-rf", str(b)])
    return "same" if done.returncode == 0 else "DIFFER: " + (done.stdout + done.stderr)[:300]


def line(verb, runs, equal):
    start = [
        sum(run["parts"][0].get(name, 0) for name in ("importing", "starting Python")) if run["parts"] else 0
        for run in runs
    ]
    s = [run["seconds"] for run in runs]
    print(
        f"| {verb} | {s[0]:.1f}{' beside another' if runs[0]['beside'] else ''} | {s[1]:.1f} | {s[0] / s[1]:.2f}x | "
        f"{(s[0] - start[0]) / max(s[1] - start[1], 1e-9):.2f}x | {equal} |",
        flush=True,
    )
    for n, run in enumerate(runs):
        parts = sorted(run["parts"][0].items(), key=lambda p: -p[1]) if run["parts"] else []
        print(
            f"    {n + 1}: CPU {run['cpu_seconds']:.0f} s; "
            + ", ".join(f"{k} {v:.1f}" for k, v in parts if v >= 0.05)
            + f"; {run['said']}",
            flush=True,
        )


figures, waiting = {}, {}


def tell(verb):
    equal = waiting.pop(verb).result()
    runs = figures[verb]["runs"]
    figures[verb]["bytes"] = equal
    line(verb, runs, equal)
    OUT.write_text(json.dumps({"model": model, "context": CONTEXT, "verbs": figures}))


print(
    f"{model}, context {CONTEXT}, {SECONDS:.0f} s\n| verb | by 1, s | by 2, s | speed-up | without starting Python and importing | bytes |",
    flush=True,
)
with ThreadPoolExecutor(8) as pool:
    for step in sys.argv[6:]:
        verbs = [part.partition(":")[::2] for part in step.split(",")]
        if left() < 20:
            print(f"-- {step}: no time left")
            continue
        alone = [pool.submit(one, v, m or "1", 1, str(n % 2), len(verbs) > 1) for n, (v, m) in enumerate(verbs)]
        alone = [each.result() for each in alone]
        for (verb, many), first in zip(verbs, alone):
            if first is None or verb in os.environ.get("M1_ONCE", "").split(","):
                continue
            second = one(verb, many or "1", 2, "0,1", False)
            figures[verb] = {"many": many, "runs": [first, second]}
            OUT.write_text(json.dumps({"model": model, "context": CONTEXT, "verbs": figures}))
            if second is None:
                print(f"| {verb} | {first['seconds']:.1f} | - | {first['said']}", flush=True)
                continue
            waiting[verb] = pool.submit(same, verb)
        for verb in [v for v in waiting if waiting[v].done()]:
            tell(verb)
    for verb in list(waiting):
        tell(verb)
print(f"== {SHAPE}: {time.monotonic() - began:.0f} s", flush=True)
