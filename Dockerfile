# Two images, for CPUs and for NVIDIA GPUs: docker build --target cpu -t sparsepack .   (or --target cuda)
#     docker run --rm -v "$PWD:/models" -p 8000:8000 sparsepack serve model.gguf --host 0.0.0.0
# CI builds and tries them; where this was written, there was no docker.
FROM python:3.12-slim AS build
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
COPY . /source
RUN SPARSEPACK_REQUIRE_KERNELS=1 pip wheel --no-cache-dir --no-deps --wheel-dir /wheels /source

FROM python:3.12-slim AS base
RUN useradd --create-home --uid 1000 sparsepack && install -d -o sparsepack /models
WORKDIR /models
ENTRYPOINT ["sparsepack"]
CMD ["--help"]
# Of `serve`, which needs `--host 0.0.0.0` to be reached from outside; other commands end before it is asked.
EXPOSE 8000
HEALTHCHECK --start-period=60s CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health')"]

FROM base AS cuda
# torch of PyPI brings CUDA; the driver is the host's, by `docker run --gpus all`.
RUN --mount=type=bind,from=build,source=/,target=/build \
    pip install --no-cache-dir -c /build/source/constraints.txt "$(echo /build/wheels/*.whl)[serve,cuda]"
USER 1000

FROM base AS cpu
RUN --mount=type=bind,from=build,source=/,target=/build \
    pip install --no-cache-dir -c /build/source/constraints.txt "$(echo /build/wheels/*.whl)[serve]" \
    --extra-index-url https://download.pytorch.org/whl/cpu
USER 1000
