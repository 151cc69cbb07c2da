# Unpacks vLLM (.lease/vllm.tar.xz of vllm_archive.py) to /tmp/vllm, behind the installed packages by a .pth, compiles it, and
# makes /tmp/slid-int8 and /tmp/slid-fp8. Called again it does nothing.
[ -e /tmp/vllm/ok ] && exit
s=$(date +%s.%N); mkdir -p /tmp/vllm
since() { python3 -c "import time; print(round(time.time()-$s,1))"; }
S=$(python3 -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
python3 - > /tmp/vllm-folders.log 2>&1 <<'P' &
import sparsepack
from sparsepack.packing import PackRequest, pack
from sparsepack.pruning.options import PruneOptions
sparsepack.prune("shipped:tiny", "/tmp/v1pruned", PruneOptions(6, 8, method="magnitude"))
for f in ("int8", "fp8"):
    pack(PackRequest("/tmp/v1pruned", f"/tmp/slid-{f}", format=f"slide-{f}"))
P
folders=$!
cat $PWD/.lease/vllm.tar.xz | xz -dc -T0 | tar -xf - -C /tmp/vllm
echo "unpacked $(since) s"
printf "/tmp/vllm/tree\n/tmp/vllm/packages\n" > $S/zz_vllm.pth
python3 -m compileall -q -j ${J:-16} /tmp/vllm/tree /tmp/vllm/packages $PWD/sparsepack > /tmp/vllm/compile.log 2>&1
for d in pydantic starlette uvicorn click gguf transformers/models/llama transformers/models/qwen2 transformers/utils torch/_inductor torch/_dynamo torch/distributed; do [ -d $S/$d ] && echo $S/$d; done | xargs python3 -m compileall -q -j ${J:-16} >> /tmp/vllm/compile.log 2>&1
echo "compiled $(since) s; $(python3 -c 'import importlib.util as u; print(u.find_spec("vllm").origin)')"
wait $folders; ls -d /tmp/slid-int8 /tmp/slid-fp8 || tail -5 /tmp/vllm-folders.log
touch /tmp/vllm/ok; echo "ready $(since) s"
