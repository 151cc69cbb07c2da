"""float16, sleep mode, weights loaded again: the same tokens before and after. v3_sleep.py FOLDER"""

import faulthandler
import os
import sys
import time

faulthandler.dump_traceback_later(int(os.environ.get("HANG", "80")), exit=True)
T = time.time()


def said(what):
    print(f"-- {time.time() - T:6.1f} s {what}", flush=True)


from vllm import LLM, SamplingParams

if __name__ == "__main__":
    import torch

    sys.path.insert(0, "tests/integration/vllm")
    from pathlib import Path

    from vllm_for_tests import PROMPTS, assert_greedy

    llm = LLM(
        model=sys.argv[1],
        max_model_len=256,
        max_num_batched_tokens=256,
        dtype="float16",
        kv_cache_memory_bytes=1 << 28,
        gpu_memory_utilization=0.02,
        enforce_eager=True,
        enable_sleep_mode=True,
        enable_prefix_caching=False,
    )
    said("LLM made, float16, sleep mode")

    def write():
        return [
            list(t.outputs[0].token_ids)
            for t in llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=16), use_tqdm=False)
        ]

    first = write()
    said("written")
    again = write()
    said(f"written again, same: {first == again}")
    assert_greedy(Path(sys.argv[1]), first, 0.1, 1, torch.float16, "cuda")
    said("float16 compared with transformers")
    for level in (1, 2):
        try:
            before = torch.cuda.mem_get_info()[0]
            llm.sleep(level=level)
            asleep = torch.cuda.mem_get_info()[0]
            llm.wake_up()
            if level == 2:
                llm.collective_rpc("reload_weights", kwargs=dict(weights_path=sys.argv[1]))
            said(
                f"sleep level {level}: {(asleep - before) / 2**20:.0f} MiB given back, same tokens after: {write() == first}"
            )
        except BaseException as e:
            said(f"sleep level {level}: {type(e).__name__}: {str(e)[:600]}")
    try:
        llm.collective_rpc("reload_weights", kwargs=dict(weights_path=sys.argv[1]))
        said(f"reload_weights: same tokens after: {write() == first}")
    except BaseException as e:
        said(f"reload_weights: {type(e).__name__}: {str(e)[:600]}")
