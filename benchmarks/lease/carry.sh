# bash benchmarks/lease/carry.sh [relu|vllm]: makes .lease/, what a machine without a network needs to run lanes: these scripts,
# wheels that it lacked on 2026-11-26, llama.cpp's sources (2.3 MB), a text, and, with `relu`, books-26m-relu (37 MB),
# with `vllm`, vLLM (19 MB). Run it in the root of a checkout that has ../shared.
set -e
ROOT=$PWD
grep -qx /.lease/ .git/info/exclude || echo /.lease/ >> .git/info/exclude
H=.lease; mkdir -p $H/wheels $H/models $H/shared/text
cp -r benchmarks/lease/* $H/
cp -n ../shared/text/books.validation.jsonl.xz $H/shared/text/
pinned() { grep -i "^$1==" constraints.txt | cut -d= -f3; }
for p in annotated-types click gguf pydantic pydantic_core starlette typing-inspection uvicorn sniffio; do
  v=$(pinned $p)
  python3 -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
    --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 --platform any -d $H/wheels $p${v:+==$v}
done
if [ ! -e $H/llama.tar.xz ]; then
  w=$(mktemp -d)
  python3 - $w "$(pinned llama_cpp_python)" <<'P'
import re, sys, urllib.request
page = urllib.request.urlopen("https://pypi.org/simple/llama-cpp-python/").read().decode()
(url,) = [u for u in re.findall(r'href="([^"#]+)', page) if u.endswith(f"-{sys.argv[2]}.tar.gz")]
urllib.request.urlretrieve(url, sys.argv[1] + "/llama.tar.gz")
P
  tar -xzf $w/llama.tar.gz -C $w; cd $w/llama_cpp_python-*/vendor/llama.cpp
  rm -rf docs models tests benches examples scripts conversion .git gguf-py media .github .devops grammars
  for b in ggml/src/ggml-*/; do case $b in */ggml-cpu/|*/ggml-cuda/) ;; *) rm -rf $b ;; esac; done
  for t in tools/*/; do case $t in */llama-bench/|*/batched-bench/) ;; *) rm -rf $t ;; esac; done
  printf 'find_package(Threads REQUIRED)\nllama_add_compile_flags()\nadd_subdirectory(llama-bench)\nadd_subdirectory(batched-bench)\n' > tools/CMakeLists.txt
  cd ..; tar -cf - llama.cpp | xz -9 > $w/l; cd "$ROOT"; mv $w/l $H/llama.tar.xz; rm -rf $w
fi
[ "$1" = relu ] && [ ! -e $H/models/relu.tar.xz ] && tar -C ../shared/models -cf - books-26m-relu | xz -9 > $H/models/relu.tar.xz
if [ "$1" = vllm ] && [ ! -e $H/vllm.tar.xz ]; then
  w=$(mktemp -d)
  python3 -m pip download -q --no-deps --only-binary=:all: --platform manylinux_2_28_x86_64 -d $w vllm==0.24.0
  python3 benchmarks/vllm_archive.py $w/vllm-*.whl $H/vllm.tar.xz; rm -rf $w
fi
du -sb $H; git ls-files -z | xargs -0 du -cb | tail -1
