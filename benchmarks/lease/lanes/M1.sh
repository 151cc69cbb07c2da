# Lane M1, TWO GPUs, alone on the machine (32 cores, 256 GB), 300 s (250 s: no `teal`, of 70B calibrate alone): issue 38 and what 35 left for two GPUs.
# 1. <= 75 s  all at once, nothing timed: random models 8B of 6 blocks (4.7 GB) and 70B of one block (5.9 GB) into the memory file
#             system (about 15 s each, one on each GPU); `pytest -m gpu tests/workers` (test_on_gpus: seven verbs over NCCL, bytes of one
#             process; about 45 s); kills: 10 runs of 8 verbs, one worker killed, the line, what is left, the rerun by another number (60 s)
# 2. <= 170 s 8B: each verb by 1 and by 2 workers: calibrate alone (20+15 s); the others' runs by one worker go in pairs side by
#             side, each on a GPU of its own (said in the table), their runs by two alone, 12 to 20 s a pair or run; teal last, if time is left
# 3. the rest (about 35 s) one block of 70B: calibrate, then thresholds and prune; AT_ONCE=2 against 1 for calibrate where time is left
t0=$(date +%s); LIMIT=${LIMIT:-300}; LOG=${LOG:-/tmp/log}; mkdir -p $LOG; H=$PWD/.lease/m1
left() { echo $(( LIMIT - $(date +%s) + t0 - ${1:-0} )); }
export NCCL_NVLS_ENABLE=0 OMP_WAIT_POLICY=passive LOG
WORK=${M1_WORK:-/dev/shm/m1}; mkdir -p $WORK
[ $(df -m --output=avail $(dirname $WORK) | tail -1) -lt ${M1_ROOM:-60000} ] && { echo "!! little room in $WORK: $(df -h $WORK | tail -1)"; WORK=/tmp/m1; mkdir -p $WORK; }
echo "== there: $(date +%T) cores $(env -u OMP_NUM_THREADS nproc), OMP ${OMP_NUM_THREADS:-}, $CUDA_VISIBLE_DEVICES, $(df -h $WORK | tail -1); $(free -g | sed -n 2p)"
nvidia-smi --query-gpu=name,memory.used,clocks.sm,power.draw --format=csv,noheader 2>/dev/null; nvidia-smi topo -m 2>/dev/null | head -4
python3 - $WORK <<'P'
import json, lzma, sys
text = "\n\n".join(json.loads(line)["text"] for line in lzma.open(".lease/shared/text/books.validation.jsonl.xz", "rt"))
open(sys.argv[1] + "/text.txt", "w").write(text[:1_400_000]); open(sys.argv[1] + "/short.txt", "w").write(text[:200_000])
P
A=${M1_8B:-shape:8b:6}; B=${M1_70B:-shape:70b:1}; C=${M1_CONTEXT:-2048}
n=${M1_FIRST:-75}
echo "== models, tests, kills: $(date +%T), at most $n s"
CUDA_VISIBLE_DEVICES=0 timeout -k 5 ${M1_MAKE:-60} python3 $H/time_verbs.py make $A $WORK > $LOG/M1-make8.txt 2>&1 & m1=$!
[ "$B" != "$A" ] && { CUDA_VISIBLE_DEVICES=1 timeout -k 5 ${M1_MAKE:-60} python3 $H/time_verbs.py make $B $WORK > $LOG/M1-make70.txt 2>&1 & m2=$!; }
timeout -k 5 $n python3 $H/kills.py $(( n - 3 )) $WORK/kills $WORK/short.txt > $LOG/M1-kills.txt 2>&1 & k=$!
timeout --foreground -s INT -k 5 $n python3 -m pytest ${M1_TESTS:--m gpu} tests/workers -n ${M1_N:-8} -q -rfE --tb=short -p no:cacheprovider -o faulthandler_timeout=60 --durations=8 > $LOG/M1-pytest.txt 2>&1
echo "-- tests: rc $?, $(( $(date +%s) - t0 )) s"; tail -5 $LOG/M1-pytest.txt
wait $m1 $m2; tail -qn 1 $LOG/M1-make*.txt
wait $k; echo "-- kills: rc $?, $(( $(date +%s) - t0 )) s"; cut -c1-420 $LOG/M1-kills.txt; rm -rf $WORK/kills
n=${M1_MAIN:-170}; l=$(left ${M1_AFTER:-36}); [ $n -gt $l ] && n=$l
echo "== 8B: $(date +%T), at most $n s; load $(cut -d' ' -f1-3 /proc/loadavg)"
[ $n -gt 30 ] && timeout -k 5 $n python3 $H/time_verbs.py $(( n - 3 )) $WORK ${M1_TEXT:-$WORK/text.txt} $A $C \
  ${M1_STEPS:-calibrate:512 thresholds:128,prune:128 rotate,pack eval:256,global:6 teal:4} 2>&1 | tee $LOG/M1-8b.txt
rm -rf $WORK/made-*8b*
n=$(left 6)
echo "== 70B: $(date +%T), at most $n s; load $(cut -d' ' -f1-3 /proc/loadavg)"
[ $n -gt 30 ] && timeout -k 5 $n python3 $H/time_verbs.py $(( n - 3 )) $WORK ${M1_TEXT:-$WORK/text.txt} $B $C ${M1_STEPS70:-calibrate:256 thresholds:64,prune:64} 2>&1 | tee $LOG/M1-70b.txt
n=$(left 5)
if [ $n -gt 28 ]; then  # the 8B of 6 blocks read by two threads: sitecustomize is taken by the sampler, so the tree is changed
  sed -i 's/^AT_ONCE = 1/AT_ONCE = 2/' sparsepack/models/stock/ahead.py; echo "== AT_ONCE 2: $(date +%T)"
  mkdir -p $WORK/two; mv $WORK/*-70B-1 $WORK/two/ 2>/dev/null
  timeout -k 5 $n python3 $H/time_verbs.py $(( n - 2 )) $WORK/two ${M1_TEXT:-$WORK/text.txt} $B $C calibrate:256 2>&1 | sed 's/^/AT_ONCE 2 /'
  sed -i 's/^AT_ONCE = 2/AT_ONCE = 1/' sparsepack/models/stock/ahead.py
fi
rm -rf $WORK
echo "== M1 $(( $(date +%s) - t0 )) s"
