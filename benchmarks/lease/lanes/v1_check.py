"""Steps of vLLM's start, each with its seconds, and a stack dump where one hangs: v1_check.py FOLDER [eager|graphs]."""

import faulthandler
import json
import os
import sys
import time

faulthandler.dump_traceback_later(int(os.environ.get("HANG", "80")), exit=True)
T, DTYPE = time.time(), os.environ.get("DTYPE", "bfloat16")


def said(what):
    print(f"-- {time.time() - T:6.1f} s {what}", flush=True)


import torch

said(f"torch {torch.__version__}")
from vllm.platforms import current_platform

current_platform.device_type
said("_C loads")
try:
    import vllm.vllm_flash_attn as f

    said(f"flash attention: {f.is_fa_version_supported(3)} {f.fa_version_unsupported_reason(3)}")
except Exception as e:
    said(f"flash attention: {e!r}")
from vllm import LLM, SamplingParams

said("vllm imported")
if __name__ == "__main__":
    how = (
        dict(enforce_eager=True)
        if "graphs" not in sys.argv
        else dict(
            compilation_config={"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 32]}
        )
    )
    if "compiled" in sys.argv:
        how = {}
    ranks = int(os.environ.get("RANKS", "1"))
    if ranks > 1:
        how |= dict(tensor_parallel_size=ranks, disable_custom_all_reduce=True)
    llm = LLM(
        model=sys.argv[1],
        max_model_len=256,
        max_num_batched_tokens=256,
        dtype=DTYPE,
        kv_cache_memory_bytes=1 << 28,
        gpu_memory_utilization=0.02,
        **how,
    )
    said("LLM made")
    sys.path.insert(0, "tests/integration/vllm")
    from pathlib import Path

    from vllm_for_tests import PROMPTS, assert_greedy

    written = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=16))
    said("written")
    written = [list(t.outputs[0].token_ids) for t in written]
    print(json.dumps(written[:3]), flush=True)
    if "nocheck" not in sys.argv:
        assert_greedy(Path(sys.argv[1]), written, 0.1, ranks, getattr(torch, DTYPE), "cuda")
        said("compared with transformers")
