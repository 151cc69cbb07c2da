# Lane R1, one GPU, 60 s of tests, then quiet, 250 s, needs llama-bench (LLAMA=1): models of sites within a budget.
# 1. 60 s  GPU tests of far products and decoders, -n 12; where one fails nothing else runs
# 2. 15 s  columns over the bus by width of tiles
# 3. 90 s  13B, half of its bytes, down alone at 0.5, beside llama.cpp by layers and MLPs (1.3x asked by issue 33, item 9)
# 4. 40 s  13B, half, all sites at 0.5
# 5. 100 s 70B, 32 GB, down alone; PEER70=1: beside llama.cpp by layers (S70 times that, too)
t0=$(date +%s); LIMIT=${LIMIT:-310}; export LOG=${LOG:-/tmp/log}; mkdir -p $LOG
export OMP_WAIT_POLICY=passive PYTHONPATH=$PWD/benchmarks
left() { echo $(( LIMIT - $(date +%s) + t0 - ${1:-0} )); }
FILES="tests/runtime/cuda/test_far_products.py tests/runtime/cuda/test_far_decoder.py tests/runtime/cuda/test_far_matrices.py tests/runtime/cuda/test_cuda_hybrid.py tests/runtime/cuda/test_host_weights.py"
OMP_NUM_THREADS=1 timeout --foreground -k 5 ${TESTS:-110} python3 -m pytest ${MARK:--m gpu} -n ${N:-12} -q -rfE --tb=short -p no:cacheprovider -o faulthandler_timeout=60 --durations=4 $FILES > $LOG/R1-pytest.txt 2>&1
rc=$?; rm -f $LOG/failed; echo "tests rc $rc, $(( $(date +%s) - t0 )) s"; grep -E "^(FAILED|ERROR|E  )" $LOG/R1-pytest.txt | cut -c1-200 | head -40; tail -1 $LOG/R1-pytest.txt
[ $rc -eq 0 ] || { touch $LOG/failed; exit 1; }
timeout -k 5 60 python3 benchmarks/far_columns.py --rounds 3 --json $LOG/R1-columns.json 2>&1 | tail -20
peer="--llama-bench /tmp/llama/b/bin/llama-bench --peer-tokens 16"
[ -e /tmp/llama/ok ] || { peer=; echo "!! no llama-bench"; }
decode() {  # SECONDS NAME ARGUMENTS...
  n=$1; name=$2; l=$(left 6); [ $n -gt $l ] && n=$l
  [ $n -lt 20 ] && { echo "-- $name: no time left"; return; }
  s=$(date +%s); timeout -k 5 $n python3 -u benchmarks/far_decode.py --threads 15 --work /dev/shm/r1 --rounds 2 --json $LOG/R1-$name.json "${@:3}" > $LOG/R1-$name.txt 2>&1
  echo "-- $name: rc $?, $(( $(date +%s) - s )) s"; grep -vE "^$" $LOG/R1-$name.txt | tail -24 | cut -c1-420
}
SHAPE=${SHAPE:-13b}
decode 150 half --shape $SHAPE --vram ${HALF:-3.7036GB} --tokens 64 $peer
decode 70 all --shape $SHAPE --vram ${HALF_ALL:-3.7036GB} --tokens 64 --sites all
decode 240 70b --shape ${BIG:-70b} --vram ${BIG_VRAM:-32GB} --tokens 48 ${PEER70:+$peer --split layers}
rm -rf /dev/shm/r1; echo "== R1 $(( $(date +%s) - t0 )) s"
