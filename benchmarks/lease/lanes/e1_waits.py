"""python e1_waits.py ARGUMENTS OF sparsepack...: runs it in this process, and says where each token's time was waited: in the
parts of a step, on the run queue (schedstat of each thread), by throttling (cgroup), and how often threads were put off."""

import glob
import os
import statistics
import sys
import threading
import time

from sparsepack.runtime.hybrid import cuda_decoder as cd
from sparsepack.runtime.hybrid.handover import next_number

rows, last = [], {}
MARKS = ("begin worker", "launch and policy", "wait for GPU", "end worker")


def answered(self, run):
    last["engine"] = self
    self._number = next_number(self._number)
    t = [time.perf_counter()]

    def mark():
        t.append(time.perf_counter())

    try:
        self._of_worker(lambda number: self._worker.begin(number, self._texts))
        mark()
        result = run()
        mark()
        self._kernels.wait_for_step()
        mark()
        self._of_worker(self._worker.end)
        mark()
        rows.append(t)
        return result
    except BaseException:
        try:
            self._kernels.synchronize(self._device)
        except RuntimeError:
            pass
        raise


cd.CudaHybridDecoder._answered = answered


def read(path):
    try:
        with open(path) as f:
            return f.read()
    except OSError:
        return ""


def threads():
    found = {}
    for path in glob.glob("/proc/self/task/*"):
        tid = path.rsplit("/", 1)[1]
        stat, sched, status = read(path + "/comm").strip(), read(path + "/schedstat").split(), read(path + "/status")
        if len(sched) == 3:
            put = {
                k: int(v)
                for k, _, v in (line.partition(":\t") for line in status.splitlines())
                if k.endswith("ctxt_switches")
            }
            found[tid] = (
                stat,
                int(sched[0]) / 1e6,
                int(sched[1]) / 1e6,
                put.get("voluntary_ctxt_switches", 0),
                put.get("nonvoluntary_ctxt_switches", 0),
                read(path + "/stat").rsplit(")", 1)[-1].split()[36:37],
            )
    return found


seen, stop = {}, threading.Event()


def sample():
    while not stop.wait(0.05):
        now = threads()
        for tid, of in now.items():
            first = seen.setdefault(tid, (of, of))[0]
            seen[tid] = (first, of)


threading.Thread(target=sample, daemon=True).start()


def cgroup():
    return {p: read(p) for p in ("/sys/fs/cgroup/cpu.stat", "/sys/fs/cgroup/cpu/cpu.stat") if os.path.exists(p)}


before, start = cgroup(), time.perf_counter()
print(
    "cpu.max",
    read("/sys/fs/cgroup/cpu.max").strip() or read("/sys/fs/cgroup/cpu/cpu.cfs_quota_us").strip(),
    "affinity",
    len(os.sched_getaffinity(0)),
    "OMP",
    os.environ.get("OMP_NUM_THREADS"),
)
sys.argv = ["sparsepack", *sys.argv[1:]]
from sparsepack.cli.app import main

try:
    main()
except SystemExit as end:
    print("exit", end.code)
stop.set()
after = cgroup()
for path in before:
    a, b = (dict(line.split() for line in each[path].splitlines()) for each in (before, after))
    print(path, {k: int(b[k]) - int(a[k]) for k in b if k in a and int(b[k]) != int(a[k])})
if rows:
    for name, i in ((m, i) for i, m in enumerate(MARKS)):
        each = sorted(1e3 * (t[i + 1] - t[i]) for t in rows)
        print(
            f"{name:18} ms: median {statistics.median(each):7.3f} mean {statistics.mean(each):7.3f} largest {[round(x, 2) for x in each[-4:]]}"
        )
    between = sorted(1e3 * (b[0] - a[-1]) for a, b in zip(rows, rows[1:]))
    whole = [1e3 * (b[0] - a[0]) for a, b in zip(rows, rows[1:])]
    print(
        f"between steps      ms: median {statistics.median(between):.3f} mean {statistics.mean(between):.3f} largest {[round(x, 2) for x in between[-4:]]}"
    )
    print(f"{len(rows)} steps; ms from step to step, in order: {[round(x, 2) for x in whole[:80]]}")
    print("traffic", last["engine"].ways.traffic, "threads", last["engine"].threads)
for tid, (a, b) in sorted(seen.items(), key=lambda each: -each[1][1][1])[:24]:
    print(
        f"thread {tid} {b[0]:16} ran {b[1] - a[1]:9.1f} ms, waited on the queue {b[2] - a[2]:8.1f} ms, put off {b[4] - a[4]} of {b[3] - a[3]}, last core {b[5]}"
    )
