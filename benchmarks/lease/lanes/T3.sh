# Lane T3, one GPU, 100 s (issue 35): site_counts old and new; a recorded block with attention's own mask; 8B whole, 70B:5. No llama.cpp, no models.
# One process (t3.py): import and 8b:4 15 s, kernels 4 s, counts compared 6 s, 3 variants of 5 s, 8b:32 15 s, waits 3 s, 70b:5 15 s, 8b:32 once more 15 s.
t0=$(date +%s); LIMIT=${LIMIT:-100}; export LOG=${LOG:-/tmp/log}; mkdir -p $LOG; H=$PWD/.lease
export TEXT=${TEXT:-$H/shared/text/books.validation.jsonl.xz}
D=${DEVICE:-cuda}; C=; [ $D = cpu ] && C="--device cpu"
export WORK=${WORK:-/dev/shm/t3}; mkdir -p $WORK
echo "== there: $(date +%T)"
python3 $H/lanes/t1_text.py "$TEXT" $WORK/text.jsonl; export TEXT=$WORK/text.jsonl
nice -n 5 python3 $H/lanes/t3.py make $C > $LOG/T3-make.txt 2>&1 & mk=$!
cp $H/lanes/t3_test_masks.py.txt tests/models/stock/test_masks.py
(OMP_NUM_THREADS=1 nice -n 5 timeout -k 5 60 python3 -m pytest -m gpu -n 0 -q -rfE --tb=short -p no:cacheprovider tests/calibration/test_calibrate_run.py tests/models/stock/test_masks.py > $LOG/T3-pytest.txt 2>&1; echo "== tests rc $? $(date +%T): $(tail -1 $LOG/T3-pytest.txt)") &
LIMIT=$((LIMIT - 6)) timeout -k 5 $((LIMIT - 5)) python3 $H/lanes/t3.py run $C 2>&1 | tr '\r' '\n' | grep -v "^note: formats" | tee $LOG/T3-out.txt
kill $mk 2>/dev/null; cat $LOG/T3-make.txt; rm -rf $WORK
rm -f sparsepack/runtime/cuda/kernels/calibration/site_counts_*.cu
echo "== end $(( $(date +%s) - t0 )) s"
