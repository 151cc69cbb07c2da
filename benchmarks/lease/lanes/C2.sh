# Lane C2, one GPU, 200 s: the GPU tests that lease 2 did not judge or that failed there (about 1,000 of 4,200). No llama-bench.
# C2_ALL=1: every GPU test (about 270 s). Outcomes: $LOG/C2-outcomes.txt, failures $LOG/C2-failures.txt.
# 1. <= LIMIT - 45 s: tests/workers/test_on_gpus.py in 3 processes beside all others in 10
# 2. <= 35 s: what failed once more, four at a time, launches waited for
t0=$(date +%s); LIMIT=${LIMIT:-200}; LOG=${LOG:-/tmp/log}; mkdir -p $LOG
left() { echo $(( LIMIT - $(date +%s) + t0 - ${1:-0} )); }
export PYTHONPATH=$PWD/.lease/c2:$PWD/.lease${PYTHONPATH:+:$PYTHONPATH} LOG OMP_WAIT_POLICY=passive OMP_NUM_THREADS=2 PYTHONWARNINGS=ignore
export LANE_FIRST=test_expert_engine,test_expert_kernels,test_gate_copies,test_stock_parts,test_collect,test_zigzag_gemv,test_zigzag_batch,test_host_weights,test_cuda_hold
[ -n "$C2_ALL" ] || export LANE_PASSED=$PWD/.lease/passed.txt
mkdir -p /tmp/shared/models
for m in /tmp/models/*/; do [ -d "$m" ] && ln -sfn "$(readlink -f $m)" /tmp/shared/models/$(basename $m); done
ln -sfn $PWD/.lease/shared/text /tmp/shared/text  # the books on which trained neurons are tested
export SPARSEPACK_SHARED=/tmp/shared
echo "== there: $(date +%T) cores $(env -u OMP_NUM_THREADS nproc) models: $(ls /tmp/shared/models) $(python3 --version) $(python3 -m pytest --version 2>&1 | tail -1)"
# Sorted: an older pytest loses the fixtures of a folder that it comes back to.
FILES=$(grep -rlwE "gpu|every_backend[a-z_]*" tests --include="test_*.py" | grep -v tests/workers/test_on_gpus.py | LC_ALL=C sort)
CORES=$(env -u OMP_NUM_THREADS nproc); N=${C2_WORKERS:-$(( CORES >= 30 ? 20 : 13 ))}; [ $N -gt $CORES ] && N=$CORES
n=$(left 6)
options="-m gpu --dist load --max-worker-restart 300 -q -rfE --tb=short -p no:cacheprovider -p lane_outcomes -o faulthandler_timeout=100 --durations=12 --durations-min=3"
echo "== GPU tests, $N workers, at most $n s: $(date +%T)"
beside=
OUTCOMES=C2- timeout --foreground -s INT -k 12 $n python3 -m pytest -n $N --maxschedchunk 12 $options ${C2_ARGS:-} $FILES > $LOG/C2-pytest.txt 2>&1
echo "== rc $?, $(( $(date +%s) - t0 )) s"
again=$(cat $LOG/C2-failed.txt 2>/dev/null | sort -u | head -40)
n=$(left 8)
if [ -n "$again" ] && [ $n -gt 15 ]; then
  echo "== once more, four at a time, launches waited for: $(date +%T)"
  mapfile -t ids <<< "$again"
  OUTCOMES=C2-again- CUDA_LAUNCH_BLOCKING=1 timeout --foreground -s INT -k 5 $n python3 -m pytest -n 4 --maxschedchunk 1 $options "${ids[@]}" > $LOG/C2-again.txt 2>&1
  echo "== rc $?, $(( $(date +%s) - t0 )) s"; cut -d' ' -f1,5- $LOG/C2-again-outcomes.txt | grep -v ^begun | cut -c1-200
fi
echo "== counts: $(cat $LOG/C2-counts.txt 2>/dev/null) on GPUs: $(cat $LOG/C2-gpus-counts.txt 2>/dev/null)"
cat $LOG/C2-broken.txt 2>/dev/null
python3 - <<'P'
import os
from pathlib import Path
log = Path(os.environ["LOG"])
for prefix in ("C2-", "C2-gpus-"):
    begun, ended, kinds = {}, set(), {}
    path = log / f"{prefix}outcomes.txt"
    for line in path.read_text().splitlines() if path.exists() else []:
        what, *rest = line.split(" ")
        if what == "begun":
            begun[" ".join(rest[1:])] = rest[0]
        else:
            ended.add(" ".join(rest[3:])); kinds[what] = kinds.get(what, 0) + 1
    print("==", prefix, "begun", len(begun), "ended", len(ended), kinds)
    for name, at in [(n, a) for n, a in begun.items() if n not in ended][:20]:
        print(f"not ended, begun at {at} s: {name}")
P
grep -hE "^(FAILED|ERROR)" $LOG/C2-pytest.txt $LOG/C2-gpus.txt | cut -c1-220 | head -60
grep -hA13 "slowest" $LOG/C2-pytest.txt | cut -c1-160
tail -2 $LOG/C2-pytest.txt
echo "== failures' texts, the last lines of each:"
cat $LOG/C2-failures.txt $LOG/C2-gpus-failures.txt 2>/dev/null | grep -vE "^$" | cut -c1-200 | head -120
