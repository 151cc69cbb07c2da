"""python kills.py SECONDS WORK TEXT: one worker of a run killed in each verb, the line, the rest, and the rerun with another number.

The worker that is to die kills itself by SIGKILL, from a thread: once its command's state lies beside the output, or once it is in
a function. States are saved after each block here.
"""

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve()
sys.path[:0] = [str(HERE.parents[2] / "benchmarks")]
CPU = os.environ.get("M1_DEVICE") == "cpu"
began = time.monotonic()
SECONDS, WORK, TEXT = float(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]


def left():
    return SECONDS - (time.monotonic() - began)


WORK.mkdir(parents=True, exist_ok=True)
SITE = r"""
import os, sys, threading, time
if "-m" in sys.orig_argv and "sparsepack" in sys.orig_argv and not ("RANK" not in os.environ and "--devices" in sys.orig_argv):
    main, mine = threading.main_thread().ident, os.environ.get("RANK", "0") == os.environ.get("M1_KILL_RANK")
    file, frame, mark = (os.environ.get(n) for n in ("M1_KILL_FILE", "M1_KILL_FRAME", "M1_KILL_MARK"))
    def inside():
        f = sys._current_frames().get(main)
        while f is not None:
            if frame in f.f_code.co_filename + ":" + f.f_code.co_name: return True
            f = f.f_back
        return False
    def run():
        patched = False
        while True:
            time.sleep(0.003)
            if not patched:
                m = sys.modules.get("sparsepack.workers.resume")
                if m is not None and hasattr(m, "pause_after"): m.SAVE_EVERY = 0.0; patched = True
            if mine and mark and ((file and os.path.exists(file)) or (frame and inside())):
                time.sleep(float(os.environ.get("M1_KILL_WAIT", "0")))
                open(mark, "w").write(repr(time.time())); os.kill(os.getpid(), 9)
    threading.Thread(target=run, daemon=True).start()
"""
(WORK / "site").mkdir(exist_ok=True)
(WORK / "site" / "sitecustomize.py").write_text(SITE)
import torch
from huggingface_hub import save_torch_state_dict
from synthetic import Size, random, save_config

from sparsepack.models.stock.skeleton import parameter_shapes

model = WORK / "model"
size = Size("kill", 64, 6, 128, 4, 2, 512) if CPU else Size("kill", 512, 12, 2048, 8, 4, 4096)
if not (model / "config.json").is_file():
    model.mkdir()
    shapes = parameter_shapes(save_config(model, size))
    g = torch.Generator().manual_seed(0)
    save_torch_state_dict({n: random(n, shapes[n], size.layers, g) for n in shapes}, model, metadata={"format": "pt"})
print(f"model: {time.monotonic() - began:.1f} s", flush=True)
WINDOWS, CONTEXT = ("8", "64") if CPU else ("64", "512")
CAL, TABLE = str(WORK / "cal"), str(WORK / "t.json")
M = str(model)
VERBS = {
    "calibrate": (
        ["calibrate", M, "--text", TEXT, "--samples", WINDOWS if not CPU else "32", "--context", CONTEXT],
        "state",
    ),
    "thresholds": (["thresholds", M, "--calibration", CAL, "--sparsity", "0.5", "--windows", WINDOWS], "state"),
    "teal": (
        ["thresholds", M, "--calibration", CAL, "--sparsity", "0.5", "--allocation", "teal", "--windows", "8"],
        "state",
    ),
    "global": (
        [
            "thresholds",
            M,
            "--calibration",
            CAL,
            "--sparsity",
            "0.5",
            "--allocation",
            "global",
            "--steps",
            "30",
            "--batch",
            "4",
            "--length",
            CONTEXT,
        ],
        "state",
    ),
    "prune": (
        ["prune", M, "--keep", "6", "--of", "8", "--calibration", CAL, "--windows", WINDOWS if not CPU else "32"],
        "state",
    ),
    "rotate": (["rotate", M, "--calibration", CAL], "state"),
    "pack": (["pack", M, "--thresholds", TABLE], "write_tensors.py"),
    "eval": (
        ["eval", M, "--thresholds", TABLE, "--perplexity", TEXT, "--windows", WINDOWS, "--context", CONTEXT],
        "perplexity.py:score_windows",
    ),
}
FLAG = {"eval": "--json", "pack": "-o"}
CASES = [
    ("calibrate", 2, 1, 1),
    ("thresholds", 2, 0, 1),
    ("global", 2, 1, 1),
    ("prune", 2, 0, 1),
    ("rotate", 2, 1, 1),
    ("pack", 2, 0, 1),
    ("eval", 2, 1, 1),
    ("teal", 2, 1, 1),
    ("calibrate", 1, 0, 2),
    ("prune", 1, 0, 2),
]
CASES = [c for c in CASES if c[0] in os.environ.get("M1_CASES", c[0]).split(",")]


def run(verb, folder, count, kill=None, gpu=0):
    folder.mkdir(parents=True, exist_ok=True)
    output = folder / f"out{'.gguf' if verb == 'pack' else ''}"
    devices = (
        ["--devices", "cpu,cpu" if CPU else "0,1"] if count == 2 else ["--device", "cpu" if CPU else f"cuda:{gpu}"]
    )
    env = {
        **os.environ,
        "PYTHONPATH": f"{WORK / 'site'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        "OMP_NUM_THREADS": "1" if CPU else "4",
    }
    if kill is not None:
        how = VERBS[verb][1]
        env |= {"M1_KILL_RANK": str(kill), "M1_KILL_MARK": str(folder / "mark")}
        env |= (
            {"M1_KILL_FILE": str(folder / ".out.unfinished" / "state.json")}
            if how == "state"
            else {"M1_KILL_FRAME": how, "M1_KILL_WAIT": "0.2" if verb == "eval" and not CPU else "0"}
        )
    s = time.time()
    try:
        done = subprocess.run(
            [
                sys.executable,
                str(HERE.parents[1] / "limited.py"),
                f"{max(left() - 1, 1):.0f}",
                sys.executable,
                "-m",
                "sparsepack",
                *VERBS[verb][0],
                FLAG.get(verb, "-o"),
                str(output),
                *devices,
            ],
            env=env,
            capture_output=True,
            text=True,
        )
    except Exception as error:
        return None, str(error), 0, 0
    return done.returncode, done.stderr, s, time.time()


def files(folder):
    return {
        str(p.relative_to(folder)): p.read_bytes()
        for p in sorted(folder.rglob("out*")) + sorted((folder / "out").rglob("*"))
        if p.is_file()
    }


pool = ThreadPoolExecutor(int(os.environ.get("M1_POOL", "16")))


def case(verb, before, rank, after, reference, gpu):
    name = f"{verb} by {before}, worker {rank} killed, again by {after}"
    folder = WORK / f"{verb}-{before}"
    rc, err, _, end = run(verb, folder, before, rank, gpu)
    mark = folder / "mark"
    if not mark.exists():
        return f"| {name} | NOT KILLED (rc {rc}) | {err[-200:]!r}"
    died = end - float(mark.read_text())
    mark.unlink()
    there = sorted(p.name for p in folder.iterdir())
    lines = [
        l
        for l in err.replace("\r", "\n").splitlines()
        if l.startswith("sparsepack:") or "Error" in l or "Traceback" in l
    ]
    rc2, err2, s, e = run(verb, folder, after, None, gpu)
    on = [l for l in err2.splitlines() if "goes on" in l or "going on" in l or "from block" in l]
    ref = reference.result()
    equal = (
        "same bytes"
        if rc2 == 0 and files(folder) == files(ref) and files(ref)
        else f"NOT THE SAME (rc {rc2}, {sorted(files(folder))}, {err2[-200:]!r})"
    )
    return f"| {name} | rc {rc}, {died:.1f} s after the kill | {len(lines)} line(s): {lines} | left: {there} | {equal} ({e - s:.0f} s) {on[-1:]}"


def reference(verb, gpu):
    folder = WORK / f"{verb}-ref"
    if not files(folder):
        run(verb, folder, 1, None, gpu)
    return folder


def by_torchrun(reference):
    folder = WORK / "torchrun"
    folder.mkdir(exist_ok=True)
    env = {
        **os.environ,
        "TMPDIR": str(folder),
        "OMP_NUM_THREADS": "1" if CPU else "4",
        **({"GLOO_SOCKET_IFNAME": "lo"} if CPU else {}),
    }
    done = subprocess.run(
        [
            sys.executable,
            str(HERE.parents[1] / "limited.py"),
            f"{max(left() - 1, 1):.0f}",
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
            "-m",
            "sparsepack",
            *VERBS["calibrate"][0],
            "-o",
            str(folder / "out"),
            "--device",
            "cpu" if CPU else "cuda",
        ],
        env=env,
        capture_output=True,
        text=True,
    )
    equal = done.returncode == 0 and files(folder) == files(reference.result())
    return f"| calibrate by torchrun, 2 | {'same bytes' if equal else f'NOT THE SAME (rc {done.returncode}): {done.stderr[-400:]!r}'}"


jobs = []
cal = pool.submit(reference, "calibrate", 0)
for n, (verb, *rest) in enumerate(CASES):
    if verb == "calibrate":
        jobs.append(pool.submit(case, verb, *rest, cal, n % 2))
if os.environ.get("M1_CASES", "torchrun") == "torchrun":
    jobs.append(pool.submit(by_torchrun, cal))
subprocess.run(["ln", "-sfn", str(cal.result() / "out"), CAL])
table = pool.submit(reference, "thresholds", 0)
wanted = [v for v in ("global", "teal", "prune", "rotate") if any(c[0] == v for c in CASES)]
refs = {"thresholds": table, **{v: pool.submit(reference, v, 1) for v in wanted}}
for n, (verb, *rest) in enumerate(CASES):
    if verb not in ("calibrate", "pack", "eval"):
        jobs.append(pool.submit(case, verb, *rest, refs[verb], n % 2))
subprocess.run(["ln", "-sfn", str(table.result() / "out"), TABLE])
refs |= {v: pool.submit(reference, v, 0) for v in ("pack", "eval")}
for n, (verb, *rest) in enumerate(CASES):
    if verb in ("pack", "eval"):
        jobs.append(pool.submit(case, verb, *rest, refs[verb], n % 2))
for each in jobs:
    try:
        print(each.result(), flush=True)
    except Exception as error:
        print("!!", repr(error), flush=True)
print(f"== kills {time.monotonic() - began:.0f} s", flush=True)
os._exit(0)
