# Lane L1, one GPU, 65 s, nothing beside (processor and bus are measured): is tune's worker faster than a model's, out of a 300 MiB cache?
export OMP_WAIT_POLICY=passive PYTHONPATH=$PWD/benchmarks
timeout -k 5 ${LIMIT:-80} python3 .lease/lanes/l1.py 40 12GB 96 4 2>&1 | cut -c1-500
