# Lane F1, one GPU, 480 s, needs llama-bench (LLAMA=1) and a quiet machine from its second step on (issue 33).
# 1. 75 s  at most: GPU tests of what no GPU has run, -n 8; beside them the GGUF of 13B is written (nothing is timed)
# 2. 110 s 13B, half: llama.cpp by layers and MLPs, ours without copies, with 1.5 and 2, llama.cpp again     (target 6x)
# 3. 70 s  13B, a quarter: llama.cpp by layers, ours without, with 1.5 and 2                                  (target 3x)
# 4. 115 s 70B, 24 GB, WikiText, static and slow (slow: +8 % asked)
# 5. 30 s  kernels of copies and of records over the bus (80 % of copies asked)
# 6. 50 s  13B, three quarters (target 3x); then what time is left: 13B half again with slow
t0=$(date +%s); LIMIT=${LIMIT:-480}; export LOG=${LOG:-/tmp/log}; mkdir -p $LOG; H=$PWD/.lease
left() { echo $(( LIMIT - $(date +%s) + t0 - ${1:-0} )); }
at() { echo "== $* : $(date +%T), $(( $(date +%s) - t0 )) s, load $(cut -d' ' -f1-3 /proc/loadavg)"; }
export OMP_WAIT_POLICY=passive PYTHONPATH=$PWD/benchmarks
shm=$(df -k --output=avail /dev/shm | tail -1)
WORK=${WORK:-$([ ${shm:-0} -gt 45000000 ] && echo /dev/shm/f1 || echo /tmp/f1)}; mkdir -p $WORK
BENCH=${BENCH:-/tmp/llama/b/bin/llama-bench}; READY=${READY:-/tmp/llama/ok}
at there "work $WORK, shm $shm kB, cores $(env -u OMP_NUM_THREADS nproc), $(nvidia-smi --query-gpu=name,memory.used,clocks.sm,power.draw --format=csv,noheader 2>/dev/null | head -1); $(free -g | sed -n 2p)"
cat /sys/fs/cgroup/cpu.max 2>/dev/null
SHAPE=${SHAPE:-13b} THREADS=${F1_THREADS:-15}
python3 - $SHAPE $WORK > $LOG/F1-gguf.txt 2>&1 <<'P' &
import sys, time
from pathlib import Path
import torch
from hybrid_synthetic import CONTEXT, SIZES
from llama_cpp_file import write_shape
from synthetic import llama_config
t, size = time.time(), SIZES[sys.argv[1]]
path = write_shape(Path(sys.argv[2]) / f"{size.name}-{size.layers}.q4_k.gguf", llama_config(size, max_position_embeddings=CONTEXT), "cuda" if torch.cuda.is_available() else "cpu")
print(path, path.stat().st_size, f"{time.time() - t:.0f} s")
P
gguf=$!
at tests
FILES="tests/runtime/cuda/test_cuda_hybrid.py tests/runtime/cuda/test_cuda_hybrid_faults.py tests/runtime/cuda/test_gate_copies.py tests/runtime/cuda/test_prepare.py"
OMP_NUM_THREADS=1 timeout --foreground -k 5 ${TESTS:-75} python3 -m pytest ${F1_MARK:--m gpu} -n ${N:-8} -q -rfE --tb=short -p no:cacheprovider -o faulthandler_timeout=60 --durations=6 $FILES > $LOG/F1-pytest.txt 2>&1
at "tests rc $?"; grep -E "^(FAILED|ERROR)" $LOG/F1-pytest.txt | cut -c1-200 | head -30; tail -1 $LOG/F1-pytest.txt
timeout 30 tail --pid=$gguf -f /dev/null; cat $LOG/F1-gguf.txt
while [ ! -e $READY ] && [ $(left 330) -gt 0 ]; do sleep 1; done
peer="--llama-bench $BENCH"; [ -e $READY ] || { peer=""; at "!! no llama-bench"; }
decode() {  # SECONDS NAME ARGUMENTS...
  n=$1; name=$2; l=$(left 6); [ $n -gt $l ] && n=$l
  [ $n -lt 20 ] && { echo "-- $name: no time left"; return; }
  at "$name, at most $n s"; s=$(date +%s)
  timeout -k 5 $n python3 ${F1_SCRIPT:-benchmarks/hybrid_decode.py} --threads $THREADS --work $WORK --json $LOG/F1-$name.json "${@:3}" > $LOG/F1-$name.txt 2>&1
  echo "-- $name: rc $?, $(( $(date +%s) - s )) s"; grep -vE "^$" $LOG/F1-$name.txt | tail -${TAILED:-30} | cut -c1-420
}
half=${F1_HALF:-3.7036GB} quarter=${F1_QUARTER:-1.8518GB} three=${F1_THREE:-5.5555GB} tokens=${F1_TOKENS:-96}
decode 150 half --shape $SHAPE --vram $half --tokens $tokens --rounds 2 --policy static --gate-copy none,1.5,2 $peer --peer-tokens 32
decode 110 quarter --shape $SHAPE --vram $quarter --tokens 48 --rounds 2 --policy static --gate-copy none,1.5,2 $peer --split layers --peer-tokens 24
decode 125 70b --shape ${F1_BIG:-70b} --vram ${F1_BIG_VRAM:-24GB} --text wikitext --tokens ${F1_BIG_TOKENS:-192} --rounds 2
n=$(left 8); [ $n -gt 40 ] && n=40
[ $n -gt 15 ] && { at kernels; timeout -k 5 $n python3 ${F1_NEURONS:-benchmarks/cuda_neurons.py} --shape 13b 2>&1 | tee $LOG/F1-kernels.txt; }
decode 70 three --shape $SHAPE --vram $three --tokens $tokens --rounds 2 $peer --split layers --peer-tokens 32
decode 60 slow --shape $SHAPE --vram $half --tokens 192 --rounds 2 --policy static,slow --gate-copy 1.5
at end; rm -rf $WORK; grep -hE "^\| (ours|llama)" $LOG/F1-*.txt | cut -c1-230
python3 - <<'P'
import json, os, pathlib, statistics
for path in sorted(pathlib.Path(os.environ["LOG"]).glob("F1-*.json")):
    for budget, of in json.loads(path.read_text()).items():
        if not isinstance(of, dict) or "ours" not in of: continue
        peer = max((statistics.median(v) for v in of["llama.cpp"].values()), default=None)
        for name, o in of["ours"].items():
            s = 1 / statistics.median(o["seconds"])
            print(path.stem, budget, name, f"{s:.1f} t/s", peer and f"{s / peer:.2f}x of {peer:.1f}", "loading %.0f s" % o["loading"])
P
echo "== F1 $(( $(date +%s) - t0 )) s"
