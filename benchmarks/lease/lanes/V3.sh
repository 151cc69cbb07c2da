# Lane V3, one GPU, 150 s, in place of V1, which has run (lease 6): vLLM compiled, asleep, in float16.
# 1. 16 s   unpack, compile
# 2. 60 s   sleep mode, float16, reload (v3_sleep.py); the tests of tests/integration/vllm compiled by one rank, int8 and fp8; beside them
# 3. <= 130 s vllm_serve.py --compiled, 28 layers, BF16, FP8, 6 of 8 INT8 and FP8, written after each turn
t0=$(date +%s); LIMIT=${LIMIT:-150}; LOG=${LOG:-/tmp/log}; mkdir -p $LOG/V3-serve; H=$PWD/.lease
left() { echo $(( LIMIT - $(date +%s) + t0 - ${1:-0} )); }
. $H/lanes/v_env.sh; export TORCHINDUCTOR_COMPILE_THREADS=3
echo "== unpack: $(date +%T) $(nvidia-smi -L | head -1)"
bash $H/vllm_unpack.sh
echo "== all at once: $(date +%T), $(( $(date +%s) - t0 )) s"
n=$(left 8)
timeout -k 3 $n python3 benchmarks/vllm_serve.py --compiled --kind BF16 --kind FP8 --kind "INT8, 6 of 8" --kind "FP8, 6 of 8" \
  --layers ${LAYERS:-28} --rounds 3 --patience $(( n - 8 )) --logs $LOG/V3-serve --json $LOG/V3-serve.json > $LOG/V3-serve.txt 2>&1 & c=$!
VLLM_ENABLE_V1_MULTIPROCESSING=0 HANG=$(( n > 90 ? 85 : n - 5 )) timeout -k 3 $n python3 $H/lanes/v3_sleep.py /tmp/slid-int8 > $LOG/V3-sleep.txt 2>&1 & a=$!
timeout -k 3 $n python3 -m pytest -m gpu -n 2 -q --tb=short -rA --timeout 130 -p no:cacheprovider tests/integration/vllm/test_vllm_gpu.py -k "compiled-1" > $LOG/V3-tests.txt 2>&1 & b=$!
B=/tmp/models/books-slid-int8  # 26 million weights, where it is carried
[ -d $B ] && { VLLM_ENABLE_V1_MULTIPROCESSING=0 HANG=$(( n - 5 )) timeout -k 3 $n python3 $H/lanes/v1_check.py $B graphs > $LOG/V3-books.txt 2>&1 & d=$!
  VLLM_ENABLE_V1_MULTIPROCESSING=0 HANG=$(( n - 5 )) timeout -k 3 $n python3 $H/lanes/v1_check.py $B compiled > $LOG/V3-books-compiled.txt 2>&1 & e=$!; }
wait $a; echo "== sleep: rc $?, $(( $(date +%s) - t0 )) s"; grep -E "^-- |tokens are not|Error" $LOG/V3-sleep.txt | cut -c1-500 | tail -20
wait $b; echo "== tests: rc $?, $(( $(date +%s) - t0 )) s"; grep -E "tokens are not|^PASSED|^FAILED|^ERROR|passed|failed" $LOG/V3-tests.txt | cut -c1-250 | tail -20
[ -d $B ] && { wait $d $e; for f in books books-compiled; do echo "# $f"; grep -E "^-- |tokens are not|^\[\[|Error" $LOG/V3-$f.txt | cut -c1-250 | tail -12; done; }
wait $c; echo "== vllm_serve --compiled: rc $?, $(( $(date +%s) - t0 )) s"; tail -25 $LOG/V3-serve.txt | cut -c1-500; tr -d ' \n' < $LOG/V3-serve.json | tail -c 1500; echo
