# Lane S70, one GPU, quiet, 300 to 400 s, needs llama-bench: 70B within 24 and 32 GB, static and slow in turns, beside llama.cpp by layers.
export OMP_WAIT_POLICY=passive PYTHONPATH=$PWD/benchmarks; mkdir -p $LOG
[ -e $LOG/failed ] && { echo "not run: R1 failed"; exit 1; }
peer="--llama-bench /tmp/llama/b/bin/llama-bench --peer-tokens 16 --split layers"
[ -e /tmp/llama/ok ] || { peer=; echo "!! no llama-bench"; }
timeout -k 5 ${LIMIT:-400} python3 benchmarks/hybrid_decode.py --shape 70b --vram 24GB,32GB --text wikitext --tokens 128 --rounds ${ROUNDS:-4} --policy static,slow --threads 15 --work /dev/shm/s70 $peer --json $LOG/S70.json 2>&1 | grep -vE "^$" | tail -40
rm -rf /dev/shm/s70
