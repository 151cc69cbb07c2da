# llama.cpp (llama-bench, llama-batched-bench) with CUDA: unpacked where it was built before, else built in the background at
# idle priority (about three minutes on 16 cores) and packed to $LOG/../llama-bin.tar.xz. /tmp/llama/ok is made when it is ready.
H=$PWD/.lease; mkdir -p /tmp/llama/b/bin; cd /tmp/llama
t0=$(date +%s)
if ls "$H"/llama-bin.0* >/dev/null 2>&1; then
  cat "$H"/llama-bin.0* | tar -xJf - -C /tmp/llama/b/bin && LD_LIBRARY_PATH=/tmp/llama/b/bin /tmp/llama/b/bin/llama-bench --list-devices && touch /tmp/llama/ok
  echo "== llama.cpp unpacked: $(( $(date +%s) - t0 )) s, $(ls /tmp/llama/ok)"; exit
fi
tar -xJf "$H/llama.tar.xz"
cmake -S llama.cpp -B b -G Ninja -DCMAKE_BUILD_TYPE=Release -DGGML_CUDA=ON -DCMAKE_CUDA_ARCHITECTURES=90-real -DLLAMA_CURL=OFF \
  -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_SERVER=OFF -DLLAMA_BUILD_APP=OFF \
  -DLLAMA_BUILD_TOOLS=ON -DGGML_CUDA_FA=ON -DGGML_NATIVE=ON '-DCMAKE_BUILD_RPATH=$ORIGIN' -DCMAKE_BUILD_RPATH_USE_ORIGIN=ON > /tmp/llama/log 2>&1
chrt -i 0 cmake --build b --target llama-bench --target llama-batched-bench -j 16 >> /tmp/llama/log 2>&1 && touch /tmp/llama/ok
echo "== llama.cpp built: $(( $(date +%s) - t0 )) s, $(ls /tmp/llama/ok 2>/dev/null || tail -3 /tmp/llama/log)"
if [ -e /tmp/llama/ok ]; then
  mkdir -p p; cp -P b/bin/*.so* b/bin/llama-bench b/bin/llama-batched-bench p/; strip -s $(find p -type f) 2>/dev/null
  du -sh p; (cd p && chrt -i 0 tar -cf - * | chrt -i 0 xz -6 -T 16 --block-size=16MiB > /tmp/llama-bin.part && mv /tmp/llama-bin.part /tmp/llama-bin.tar.xz)
  ls -la /tmp/llama-bin.tar.xz
fi
