# Lane P1, one GPU, 45 s, on a machine that does nothing else: where a short prompt's time goes (launches of the host?), for
# gemma-2-2b (6 layers) and qwen3-30b-a3b (6 layers), with scratch of 256 MB and of 1 GB. No llama-bench. $LOG/P1-profile.txt
LOG=${LOG:-/tmp/log}; mkdir -p $LOG; export OMP_WAIT_POLICY=passive; t0=$(date +%s)
timeout -k 5 $(( ${LIMIT:-45} - 3 )) python3 .lease/prefill_profile.py $LOG/P1-profile.txt > $LOG/P1-err.txt 2>&1
echo "== P1 rc $?, $(( $(date +%s) - t0 )) s"; head -c 9000 $LOG/P1-profile.txt; grep -vi warn $LOG/P1-err.txt | tail -5
