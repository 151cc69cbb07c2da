# Lane E2, one GPU, 200 s, needs llama-bench (LLAMA=1; built about 100 s after the start, so best after another lane):
# issue 37's GPU figures beside llama.cpp. Figures: $LOG/E2-*.json, tables: $LOG/E2-*.txt, printed last.
# 1. 75 s  qwen3-30b-a3b, decode and prefill (after the regrouping of prefill's kernels), llama.cpp in the same run (18 GB file)
# 2. 25 s each  gemma-2-2b, gemma-3-1b, phi-4-mini, llama.cpp in the same run
# 3. 35 s  cuda_batch of the 8B shape, beside llama-batched-bench where it builds (a second program of the same build)
t0=$(date +%s); LIMIT=${LIMIT:-200}; LOG=${LOG:-/tmp/log}; mkdir -p $LOG; WORK=${WORK:-/tmp/e2}; mkdir -p $WORK
BENCH=${BENCH:-/tmp/llama/b/bin/llama-bench}; READY=${READY:-/tmp/llama/ok}
left() { echo $(( LIMIT - $(date +%s) + t0 - ${1:-0} )); }
export OMP_WAIT_POLICY=passive
while [ ! -e $READY ] && [ $(left 60) -gt 0 ]; do sleep 1; done
peer="--llama-bench $BENCH"
[ -e $READY ] || { echo "!! no llama-bench after $(( $(date +%s) - t0 )) s: ours alone"; peer=""; }
echo "== ready $(date +%T), $(( $(date +%s) - t0 )) s; load $(cut -d' ' -f1-3 /proc/loadavg); $(nvidia-smi --query-gpu=name,clocks.sm,power.draw --format=csv,noheader 2>/dev/null | head -1); $(df -h $WORK | tail -1)"
families() {  # SECONDS NAME MORE...
  n=$1; l=$(left 6); [ $n -gt $l ] && n=$l
  [ $n -lt 15 ] && { echo "-- $2: no time left"; return; }
  s=$(date +%s); echo "== $2: $(date +%T), at most $n s"
  timeout -k 5 $n python3 benchmarks/cuda_families.py --model $2 $peer --work $WORK --json $LOG/E2-$2.json "${@:3}" > $LOG/E2-$2.txt 2>&1
  echo "-- $2: rc $?, $(( $(date +%s) - s )) s; load $(cut -d' ' -f1 /proc/loadavg)"; rm -f $WORK/peer.*
  grep -vE "^$|Warning|warn" $LOG/E2-$2.txt | tail -22 | cut -c1-220
}
# Another program of the same build, at idle priority, while the first model is timed on the GPU.
BATCHED=${BATCHED:-$(dirname $BENCH)/llama-batched-bench}
build_batched() {
  [ -e $READY ] && [ ! -x $BATCHED ] && [ -d /tmp/llama/llama.cpp/tools ] && [ -d .lease/batched-bench ] || return
  cp -r .lease/batched-bench /tmp/llama/llama.cpp/tools/ && echo "add_subdirectory(batched-bench)" >> /tmp/llama/llama.cpp/tools/CMakeLists.txt
  timeout -k 5 100 chrt -i 0 cmake --build /tmp/llama/b --target llama-batched-bench -j 3 > $LOG/E2-batched-build.txt 2>&1
  echo "batched-bench: rc $?" >> $LOG/E2-batched-build.txt
}
build_batched &
[ -n "$E2_MIXTURE" ] && families 95 qwen3-30b-a3b --rounds 2 ${E2_ARGS:-}
families 45 gemma-2-2b --rounds 3 ${E2_ARGS:-}
families 40 phi-4-mini --rounds 3 ${E2_ARGS:-}
families 40 gemma-3-1b --rounds 3 ${E2_ARGS:-}
batch() {
  n=$(left 8); [ $n -lt 25 ] && { echo "-- batch: no time left"; return; }
  [ $n -gt 60 ] && n=60
  s=$(date +%s); echo "== several texts, 8B: $(date +%T), at most $n s"
  timeout -k 5 $n python3 benchmarks/cuda_batch.py --rounds 2 --json $LOG/E2-batch.json ${E2_BATCH:-} > $LOG/E2-batch.txt 2>&1
  echo "-- ours: rc $?, $(( $(date +%s) - s )) s"; tail -8 $LOG/E2-batch.txt
  n=$(left 6); [ $n -gt 40 ] && n=40
  [ -x $BATCHED ] && [ $n -gt 15 ] || { echo "-- llama-batched-bench: none, or no time left ($n s)"; tail -2 $LOG/E2-batched-build.txt 2>/dev/null; return; }
  s=$(date +%s)
  timeout -k 5 $n python3 - $WORK/batch.gguf > $LOG/E2-batched.txt 2>&1 <<'P'
import os, sys
sys.path.insert(0, "benchmarks")
from pathlib import Path
from cuda_synthetic import CONTEXT, LLAMA_8B
from llama_cpp_file import write_shape
from synthetic import Size, llama_config
size, layers, device = LLAMA_8B, LLAMA_8B.layers, "cuda"
if os.environ.get("E2_TINY"):
    size, layers, device = Size("tiny", 256, 2, 512, 4, 2, 512), 2, "cpu"
write_shape(Path(sys.argv[1]), llama_config(size, num_hidden_layers=layers, max_position_embeddings=CONTEXT), device)
P
  timeout -k 5 $(left 5) $BATCHED -m $WORK/batch.gguf -c 4096 -b 2048 -ub 512 -npp 128 -ntg 128 -npl 1,2,4,8 -ngl 99 -fa on >> $LOG/E2-batched.txt 2>&1
  echo "-- llama-batched-bench: rc $?, $(( $(date +%s) - s )) s"; grep -E "^\|" $LOG/E2-batched.txt || tail -5 $LOG/E2-batched.txt
  rm -f $WORK/batch.gguf
}
batch
echo "== summary"
python3 - <<'P'
import glob, json, os, statistics
for path in sorted(glob.glob(os.environ.get("LOG", "/tmp/log") + "/E2-*.json")):
    for name, of in json.load(open(path)).items():
        if not isinstance(of, dict) or "decode" not in of:
            continue
        peer = statistics.median(of["peer"]["decode"]) if of["peer"]["decode"] else None
        d = {k: 1 / v["seconds"] for k, v in of["decode"].items()}
        x = {k: f"{v:.0f}" + (f" ({v / peer:.2f}x)" if peer else "") for k, v in d.items()}
        print(f"{name}: llama.cpp {peer and round(peer)}; {x}; check {of['check']}")
        theirs = {int(k): v for k, v in of["peer"]["prompts"].items()}
        print("   prompts, ours (llama.cpp):", ", ".join(f"{n}: {int(n) / s:.0f} ({theirs.get(int(n), 0):.0f})" for n, s in of["prefill"].items()))
P
echo "== E2 $(( $(date +%s) - t0 )) s"
