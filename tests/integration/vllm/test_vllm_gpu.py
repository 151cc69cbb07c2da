"""vLLM on GPUs serves slid folders: the tokens of transformers on the same GPU."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm_for_tests import PROMPTS, assert_greedy, in_vllm, made

# Files that are named are collected, whatever conftest.py leaves out.
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(find_spec("vllm.version") is None, reason="no vLLM")]

AS_LIKELY = 0.1
"""Of the standard deviation of logits, which are bfloat16 here: attention, norms and sums of several ranks differ in
their last bits, and inputs of Linears are rounded to the next step."""
WITH_GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 32]}
WAYS: dict[str, dict[str, Any]] = {
    "eager": {"enforce_eager": True, "disable_custom_all_reduce": True},  # by NCCL alone
    "graphs": {"compilation_config": WITH_GRAPHS},
    "compiled": {},
}


@pytest.fixture(scope="module", params=["slide-int8", "slide-fp8"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made("shipped:tiny", tmp_path_factory.mktemp("tiny"), request.param)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("way", WAYS)
def test_tokens_are_those_of_transformers_on_the_gpu(folder: Path, way: str, ranks: int) -> None:
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"for {ranks} GPUs")
    options = WAYS[way] | {"dtype": "bfloat16", "kv_cache_memory_bytes": 1 << 28, "gpu_memory_utilization": 0.02}
    if ranks > 1:
        options |= {"tensor_parallel_size": ranks}
    written = in_vllm(folder, PROMPTS, **options)
    assert_greedy(folder, written, AS_LIKELY, ranks, torch.bfloat16, "cuda")
