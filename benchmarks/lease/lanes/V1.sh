# Lane V1, one GPU, 150 s: vLLM 0.24.0 with slid folders (needs .lease/vllm.tar.xz, 18 MB). No llama, no relu.
# 1. 20 s   unpack, compile, slid folders of shipped:tiny (side by side)
# 2. 45 s   first tokens: int8 eager, and fp8 with CUDA graphs, side by side, compared with transformers; beside them the start of
# 3. <= 120 s benchmarks/vllm_serve.py, Qwen2.5-7B's shape, 28 layers, five kinds (45 s to start), a file after each turn
# 4. if any is left: slide_gemm.py --vllm, 64/256/8192 tokens (for --linears)
t0=$(date +%s); LIMIT=${LIMIT:-150}; LOG=${LOG:-/tmp/log}; mkdir -p $LOG; H=$PWD/.lease
left() { echo $(( LIMIT - $(date +%s) + t0 - ${1:-0} )); }
upto() { n=$(left ${2:-6}); [ $n -gt $1 ] && n=$1; [ $n -lt 5 ] && n=5; echo $n; }
. $H/lanes/v_env.sh
echo "== unpack: $(date +%T) $(nvidia-smi -L | head -1)"
bash $H/vllm_unpack.sh
echo "== first tokens and vllm_serve: $(date +%T), $(( $(date +%s) - t0 )) s"
n=$(upto 100); mkdir -p $LOG/V1-serve
VLLM_ENABLE_V1_MULTIPROCESSING=0 HANG=$(( n - 8 )) timeout -k 5 $n python3 $H/lanes/v1_check.py /tmp/slid-int8 eager > $LOG/V1-int8-eager.txt 2>&1 & a=$!
VLLM_ENABLE_V1_MULTIPROCESSING=0 HANG=$(( n - 8 )) timeout -k 5 $n python3 $H/lanes/v1_check.py /tmp/slid-fp8 graphs > $LOG/V1-fp8-graphs.txt 2>&1 & b=$!
sleep 2
n=$(left 12)
timeout -k 3 $n python3 benchmarks/vllm_serve.py --kind BF16 --kind INT8 --kind FP8 --kind "INT8, 6 of 8" --kind "FP8, 6 of 8" \
  --layers ${LAYERS:-28} --rounds 3 --patience $(( n - 15 )) --logs $LOG/V1-serve --json $LOG/V1-serve.json > $LOG/V1-serve.txt 2>&1 & c=$!
wait $a; ra=$?; wait $b; rb=$?
echo "== tokens: rc $ra $rb, $(( $(date +%s) - t0 )) s"
for f in int8-eager fp8-graphs; do echo "# $f"; grep -E "^-- |tokens are not|Using .*(backend|FlashAttention)|^\[\[|Error" $LOG/V1-$f.txt | cut -c1-220 | tail -24; done
[ $ra != 0 ] && tail -25 $LOG/V1-int8-eager.txt | cut -c1-250
[ $rb != 0 ] && tail -12 $LOG/V1-fp8-graphs.txt | cut -c1-250
wait $c
echo "== vllm_serve: rc $?, $(( $(date +%s) - t0 )) s"; tail -25 $LOG/V1-serve.txt | cut -c1-500; tail -c 1500 $LOG/V1-serve.json
n=$(left 4)
if [ $n -gt 12 ]; then
  echo "== slide_gemm: $(date +%T)"
  timeout -k 3 $n python3 benchmarks/slide_gemm.py --tokens 64 --tokens 256 --tokens 8192 --rounds 3 --vllm /tmp/vllm/tree/vllm/_C_stable_libtorch.abi3.so --json $LOG/V1-gemm.json > $LOG/V1-gemm.txt 2>&1
  echo "== rc $?"; tail -30 $LOG/V1-gemm.txt
fi
