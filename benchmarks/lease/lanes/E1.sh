# Lane E1, one GPU, nothing beside, 120 s (165 with step 4), without llama.cpp (issue 33). Needs /tmp/models/books-26m-relu, r.gguf and .lease/shared/text.
# 1. 50 s acceptance: tune (10 to 45), place, generate twice, bench, generate     2. 6 s generate again with a trace of waits
# 3. 60 s agreement, 10,752 positions, four placements (99.9 % asked, hits equal the simulator's)
# 4. if time is left: 30 s all on the card against the cuda engine (2 %), 15 s kernels (also in F1)
t0=$(date +%s); LIMIT=${LIMIT:-165}; export LOG=${LOG:-/tmp/log}; mkdir -p $LOG; H=$PWD/.lease
left() { echo $(( LIMIT - $(date +%s) + t0 - ${1:-0} )); }
at() { echo "== $* : $(date +%T), $(( $(date +%s) - t0 )) s, load $(cut -d' ' -f1-3 /proc/loadavg)"; }
R=${R:-/tmp/models/r.gguf} D=${D:-cuda}; export OMP_WAIT_POLICY=passive
P="It was a cold evening, and"; L=$PWD/.lease/lanes
at there "$(nvidia-smi --query-gpu=name,memory.used,clocks.sm --format=csv,noheader 2>/dev/null | head -1), cores $(env -u OMP_NUM_THREADS nproc), cpu.max $(cat /sys/fs/cgroup/cpu.max 2>/dev/null)"
nvidia-smi --query-compute-apps=pid,used_memory --format=csv,noheader 2>/dev/null
ps -eo pid,pcpu,comm --sort=-pcpu | head -6
gen() { timeout -k 5 25 sparsepack generate $R --device $D --cached 0.3 --prompt "$P" 2>&1 | cut -c1-600; }
at tune; timeout -k 5 45 sparsepack tune $R --device $D 2>&1 | tr '\r' '\n' | tail -25
at place; timeout -k 5 15 sparsepack place $R --vram 12MB 2>&1 | tail -25
at "generate 1"; gen
at "generate 2"; gen
at bench; timeout -k 5 30 sparsepack bench $R --device $D --cached 0.3 2>&1 | tr '\r' '\n' | tail -25
at "generate 3"; gen
at "generate, traced"; timeout -k 5 25 python3 $L/e1_waits.py generate $R --device $D --cached 0.3 --prompt "$P" 2>&1 | cut -c1-900 | tee $LOG/E1-waits.txt
T=$H/shared/text/books.validation.jsonl.xz
n=$(left 6); sessions=$(( (n - 12) / 8 )); [ $sessions -gt 6 ] && sessions=6
if [ $sessions -gt 0 ]; then
  at "agreement, $sessions sessions, at most $n s"  # one process: spinning kernels of several would take turns on the GPU
  timeout -k 5 $n python3 benchmarks/neuron_agreement.py $R --text ${TEXT:-$T} --backend $D --placement none,all,random,default --sessions ${SESSIONS:-$sessions} --tokens ${TOKENS:-2048} --prompt ${PROMPT:-256} > $LOG/E1-agree.txt 2>&1
  echo "rc $?"; tr '\r' '\n' < $LOG/E1-agree.txt | grep -vE "^$|comparing" | tail -45 | cut -c1-260
fi
n=$(left 6)
[ $n -gt 25 ] && { at "all on the card"; PYTHONPATH=$PWD/benchmarks timeout -k 5 $n python3 benchmarks/hybrid_decode.py --shape 13b --whole --tokens 64 --rounds 2 --json $LOG/E1-whole.json 2>&1 | tail -12; }
n=$(left 6); [ $n -gt 30 ] && n=30
[ $n -gt 15 ] && { at kernels; PYTHONPATH=$PWD/benchmarks timeout -k 5 $n python3 benchmarks/cuda_neurons.py --shape 13b 2>&1 | tail -40 | tee $LOG/E1-kernels.txt; }
at end
