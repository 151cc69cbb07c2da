"""python limited.py SECONDS COMMAND...: runs a command, and ends it with all that it started when the time is over."""

import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path


def children(of):
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            except OSError:
                continue
            found.setdefault(int(fields[1]), []).append(int(entry.name))
    out, todo = [], [of]
    while todo:
        for pid in found.get(todo.pop(), []):
            out.append(pid)
            todo.append(pid)
    return out


ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: orphans become ours
seconds = float(sys.argv[1])
start = time.monotonic()
run = subprocess.Popen(sys.argv[2:], start_new_session=True)
try:
    rc = run.wait(seconds)
except subprocess.TimeoutExpired:
    rc = 124
for sig, wait in ((signal.SIGTERM, 3), (signal.SIGKILL, 2)):
    end = time.monotonic() + wait
    left = children(os.getpid())
    for pid in left:
        try:
            os.kill(pid, sig)
        except OSError:
            pass
    while left and time.monotonic() < end:
        time.sleep(0.1)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            pass
        left = children(os.getpid())
    if not left:
        break
print(f"== rc {rc} after {time.monotonic() - start:.0f} s of {seconds:.0f}: {' '.join(sys.argv[2:])[:120]}", flush=True)
sys.exit(rc if rc >= 0 else 128 - rc)
