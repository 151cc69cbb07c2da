# Installs what was carried: wheels that the machine lacks, sparsepack from the tree, models. Seconds are printed.
set -e -o pipefail
t0=$(date +%s)
H=$PWD/.lease
nvidia-smi --query-gpu=name,memory.total,power.limit,driver_version --format=csv,noheader; lscpu | grep -E "Model name|^CPU\(s\)|L2|L3|NUMA node"; free -g | sed -n 2p
want=$(python3 - "$H"/wheels/*.whl <<'P'
import importlib.metadata as m, sys
for path in sys.argv[1:]:
    name = path.rsplit("/", 1)[1].split("-")[0]
    try:
        have = m.version(name)
        if name in ("pydantic", "pydantic_core", "click", "gguf"):
            raise m.PackageNotFoundError
    except m.PackageNotFoundError:
        print(path)
P
)
echo "installed here:" $want | sed "s#$H/wheels/##g"
[ -n "$want" ] && python3 -m pip install -q --no-index --no-deps --no-cache-dir --no-compile $want
SPARSEPACK_REQUIRE_KERNELS=1 python3 -m pip install -q --no-index --no-deps --no-build-isolation --no-cache-dir -e . 2>&1 | tail -3 &
inst=$!
mkdir -p /tmp/models
for a in "$H"/models/*.tar.xz; do [ -e "$a" ] && tar -xJf "$a" -C /tmp/models; done
cp "$H"/models/*.gguf /tmp/models/ 2>/dev/null || true
wait $inst
sparsepack --version || true
if [ -d /tmp/models/books-26m-relu ] && [ ! -e /tmp/models/r.gguf ]; then
  sparsepack trace /tmp/models/books-26m-relu --text "$H/shared/text/books.validation.jsonl.xz" --sessions 4 --tokens 1024 --device cuda -o /tmp/tr -q | tail -1
  sparsepack pack /tmp/models/books-26m-relu --format neuron-q4_k --calibration /tmp/tr --output /tmp/models/r.gguf | tail -1
fi
ls -la /tmp/models
echo "== setup $(( $(date +%s) - t0 )) s"
