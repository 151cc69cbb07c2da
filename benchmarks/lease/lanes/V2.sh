# Lane V2, two GPUs, 150 s, behind V1 on the same machine: tensor parallelism of 2 with slid folders.
# 1. 0 s (20 where V1 did not run)  unpack
# 2. 110 s tokens of int8 by two ranks, eager, compared with transformers; beside it the start of
# 3. <= 140 s vllm_serve.py --ranks 2: BF16, FP8 and 6 of 8 INT8 and FP8, 28 layers
t0=$(date +%s); LIMIT=${LIMIT:-150}; LOG=${LOG:-/tmp/log}; mkdir -p $LOG; H=$PWD/.lease
left() { echo $(( LIMIT - $(date +%s) + t0 - ${1:-0} )); }
. $H/lanes/v_env.sh
echo "== unpack: $(date +%T) $(nvidia-smi -L | wc -l) GPUs"
bash $H/vllm_unpack.sh
n=$(left 8); mkdir -p $LOG/V2-serve
VLLM_WORKER_MULTIPROC_METHOD=spawn RANKS=2 HANG=$(( n - 6 )) timeout -k 3 $n python3 $H/lanes/v1_check.py /tmp/slid-int8 eager > $LOG/V2-int8-eager.txt 2>&1 & a=$!
timeout -k 3 $n python3 benchmarks/vllm_serve.py --ranks 2 --kind BF16 --kind FP8 --kind "INT8, 6 of 8" --kind "FP8, 6 of 8" \
  --layers ${LAYERS:-28} --rounds 2 --patience $(( n - 12 )) --logs $LOG/V2-serve --json $LOG/V2-serve.json > $LOG/V2-serve.txt 2>&1 & c=$!
B=/tmp/models/books-slid-int8
[ -d $B ] && { VLLM_WORKER_MULTIPROC_METHOD=spawn RANKS=2 HANG=$(( n - 6 )) timeout -k 3 $n python3 $H/lanes/v1_check.py $B graphs > $LOG/V2-books.txt 2>&1 & d=$!; }
[ -d $B ] && { CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES%%,*} DTYPE=float16 VLLM_ENABLE_V1_MULTIPROCESSING=0 HANG=$(( n - 6 )) timeout -k 3 $n python3 $H/lanes/v1_check.py $B graphs > $LOG/V2-books-fp16.txt 2>&1 & e=$!; }
wait $a; ra=$?
echo "== tokens by two ranks: rc $ra, $(( $(date +%s) - t0 )) s"
grep -E "^-- |tokens are not|^\[\[|Error" $LOG/V2-int8-eager.txt | cut -c1-220 | tail -24
[ $ra != 0 ] && tail -25 $LOG/V2-int8-eager.txt | cut -c1-250
echo "same first tokens as on one GPU:"; grep -h "^\[\[" $LOG/V1-int8-eager.txt $LOG/V2-int8-eager.txt | uniq -c | cut -c1-200
[ -d $B ] && { wait $d $e; for f in books books-fp16; do echo "# $f"; grep -E "^-- |tokens are not|Error" $LOG/V2-$f.txt | grep -v qutlass | cut -c1-250 | tail -12; done; }
wait $c
echo "== vllm_serve: rc $?, $(( $(date +%s) - t0 )) s"; tail -25 $LOG/V2-serve.txt | cut -c1-500; tail -c 1200 $LOG/V2-serve.json
