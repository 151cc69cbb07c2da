"""Do links that are measured out of 256 MiB (what a cache of 300 MiB holds) divide worse than those out of four times the caches?
Half of a 70B shape within half of 24 GB, both links in turns, and the worker's speed of the first."""

import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import hybrid_decode as hd
import torch
from hybrid_synthetic import SIZES, random_neurons
from replayed import CARRIED, tiled
from synthetic import random_ids
from turns import in_turns

from sparsepack.runtime.cuda.driver.kernel_set import KERNELS
from sparsepack.runtime.engine import Engine
from sparsepack.runtime.hybrid import measure, measure_card
from sparsepack.runtime.options import EngineOptions

t0 = time.time()
for path in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
    print(path.name, *((path / n).read_text().strip() for n in ("level", "type", "size", "shared_cpu_list")))
layers, vram, tokens, rounds = (int(a) if a.isdigit() else a for a in sys.argv[1:5])
size = replace(SIZES["70b"], layers=layers)
device = torch.device("cuda")
activity = tiled(size.layers, size.intermediate, tokens=tokens, path=CARRIED)
packed = random_neurons(size, activity.frequency, "cuda")
print(f"made, {time.time() - t0:.0f} s", flush=True)
links = {}
for name, rotation in {"256 MiB": 1 << 28, "1200 MiB": 1200 << 20}.items():
    measure.beyond_caches = measure_card.measure.beyond_caches = lambda of, rotation=rotation: -(-rotation // of)
    try:
        found = measure_card.measure_card(KERNELS, device, 14, size.hidden)
        links[name] = found.together
        print(
            name,
            found,
            f"worker {found.together.worker * 9216 / 1e9:.1f} GB/s, alone {found.alone.worker * 9216 / 1e9:.1f}; bus {found.together.bus * 9216 / 1e9:.1f}, {time.time() - t0:.0f} s",
            flush=True,
        )
    except Exception as error:
        print(name, "not measured:", error, flush=True)
if "1200 MiB" not in links and links:
    links["1200 MiB"] = replace(links["256 MiB"], worker=links["256 MiB"].worker * 0.6)
    print("in its place 0.6 of the worker's speed")
settings = EngineOptions(
    device="cuda", context=1 + tokens, cache_type="f16", threads=15, vram=vram, activity=activity.bits
)
engines, prompt = {}, random_ids(size.vocabulary, 1, seed=3)
for name, of in links.items():
    engines[name] = Engine(packed, replace(settings, links=of))
    engines[name]._decoder.follow("static")
    print(f"{name} loaded, {time.time() - t0:.0f} s", flush=True)


def timed(name):
    engine = engines[name]
    seconds = hd.decode_seconds(engine, prompt, len(activity.bits))
    of = hd.per_token(engine.ways, seconds)
    print(
        f"{name}: {1 / seconds:.1f} t/s, waited {of['waited_us']:.0f} us, MB { ({k: round(v / 1e6) for k, v in of['bytes'].items()}) }, {time.time() - t0:.0f} s",
        flush=True,
    )
    return 1 / seconds


for name, speeds in in_turns({name: partial(timed, name) for name in engines}, rounds, warm_up=1).items():
    print(name, sorted(round(s, 1) for s in speeds))
