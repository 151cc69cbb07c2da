# Lane M3, TWO GPUs (issue 38), in two steps: M3_STEP=tests (130 s, may run beside others; M3_STEP=make: 40 s, the model alone, by one GPU) and
# M3_STEP=verbs (230 s, alone on the machine).
# tests: tests/workers/test_on_gpus.py by seven processes; kills of verbs and reruns by another number; a model of two 8B blocks is made
# verbs: each verb by one and by two workers, of that model; runs by one worker go in pairs, each on a GPU of its own
t0=$(date +%s); LIMIT=${LIMIT:-230}; LOG=${LOG:-/tmp/log}; mkdir -p $LOG; H=$PWD/.lease/m1
left() { echo $(( LIMIT - $(date +%s) + t0 - ${1:-0} )); }
export NCCL_NVLS_ENABLE=0 OMP_WAIT_POLICY=passive LOG
WORK=${M1_WORK:-/dev/shm/m1}; mkdir -p $WORK; A=${M1_8B:-shape:8b:2}; C=${M1_CONTEXT:-2048}
if [ "$M3_STEP" = tests ] || [ "$M3_STEP" = make ]; then
  python3 - $WORK <<'P2'
import json, lzma, sys
text = "\n\n".join(json.loads(line)["text"] for line in lzma.open(".lease/shared/text/books.validation.jsonl.xz", "rt"))
open(sys.argv[1] + "/text.txt", "w").write(text[:1_000_000]); open(sys.argv[1] + "/short.txt", "w").write(text[:200_000])
P2
  CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES%%,*} timeout -k 5 60 python3 $H/time_verbs.py make $A $WORK > $LOG/M3-make.txt 2>&1 & m=$!
  [ "$M3_STEP" = make ] && { wait $m; tail -n 1 $LOG/M3-make.txt; exit; }
  n=$(left 6)
  M1_CASES=${M1_CASES:-global,prune,pack,eval} timeout -k 5 $n python3 $H/kills.py $(( n - 3 )) $WORK/kills $WORK/short.txt > $LOG/M3-kills.txt 2>&1 & k=$!
  timeout --foreground -s INT -k 5 $n python3 -m pytest ${M1_TESTS:--m gpu} tests/workers/test_on_gpus.py -n 7 -v -rfE --tb=short -p no:cacheprovider --durations=8 > $LOG/M3-pytest.txt 2>&1
  echo "-- tests: rc $?, $(( $(date +%s) - t0 )) s"; grep -E "PASSED|FAILED|ERROR|passed|failed" $LOG/M3-pytest.txt | cut -c1-200
  wait $m; tail -n 1 $LOG/M3-make.txt
  wait $k; echo "-- kills: rc $?, $(( $(date +%s) - t0 )) s"; cut -c1-420 $LOG/M3-kills.txt; rm -rf $WORK/kills
else
  n=$(left 6); echo "== verbs: $(date +%T), at most $n s; load $(cut -d' ' -f1-3 /proc/loadavg)"
  M1_CAP=${M1_CAP:-100} timeout -k 5 $n python3 $H/time_verbs.py $(( n - 3 )) $WORK $WORK/text.txt $A $C ${M1_STEPS:-calibrate:256 thresholds:64,rotate prune:32,pack eval:128,global:4} 2>&1 | tee $LOG/M3-verbs.txt
  rm -rf $WORK
fi
