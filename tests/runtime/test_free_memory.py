"""How much memory there is, as the system and the limits of containers say it: on folders that look like /proc and
/sys."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from model_table import LATENTS
from packed_models import random_model, with_sites

from sparsepack.models.sites import SiteRule
from sparsepack.runtime import free_memory as room
from sparsepack.runtime.backends import BACKENDS
from sparsepack.runtime.decoder import kept_latents
from sparsepack.runtime.free_memory import cache_bytes, free_host_bytes

MIB = 2**20
V2, V1 = "sys/fs/cgroup", "sys/fs/cgroup/memory"


def machine(root: Path, groups: str, **files: str) -> Path:
    """A machine with 8 GiB of memory that can be had."""
    files = {"proc/meminfo": f"MemTotal: 16 kB\nMemAvailable: {8192 * 1024} kB\n", "proc/self/cgroup": groups, **files}
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def v2(limit: object, used: int, inactive: int = 0, group: str = "") -> dict[str, str]:
    stat = f"anon 5\ninactive_file {inactive}\n"
    folder = f"{V2}/{group}".rstrip("/")
    return {
        f"{folder}/memory.max": f"{limit}\n",
        f"{folder}/memory.current": f"{used}\n",
        f"{folder}/memory.stat": stat,
    }


def v1(limit: int, used: int, inactive: int = 0, group: str = "") -> dict[str, str]:
    folder = f"{V1}/{group}".rstrip("/")
    return {
        f"{folder}/memory.limit_in_bytes": f"{limit}\n",
        f"{folder}/memory.usage_in_bytes": f"{used}\n",
        f"{folder}/memory.stat": f"inactive_file 1\ntotal_inactive_file {inactive}\n",
    }


CASES = {
    "no groups": ("", {}, 8192),
    "no limit": ("0::/\n", v2("max", 100 * MIB), 8192),
    "a container": ("0::/\n", v2(1000 * MIB, 300 * MIB), 700),
    "files that are given back": ("0::/\n", v2(1000 * MIB, 900 * MIB, 600 * MIB), 700),
    "more than the machine has": ("0::/\n", v2(20000 * MIB, 0), 8192),
    "more is used than may be": ("0::/\n", v2(1000 * MIB, 1001 * MIB), 0),
    "a service": ("0::/a/b.service\n", v2(500 * MIB, 100 * MIB, group="a/b.service"), 400),
    "the group around it": (
        "0::/a/b\n",
        {**v2("max", 5 * MIB, group="a/b"), **v2(300 * MIB, 100 * MIB, group="a")},
        200,
    ),
    "a path of the host": ("0::/docker/0123\n", v2(1000 * MIB, 300 * MIB), 700),
    "version 1": ("5:cpu:/x\n4:memory:/x\n0::/\n", v1(600 * MIB, 200 * MIB, 50 * MIB, group="x"), 450),
    "version 1, a path of the host": ("4:hugetlb,memory:/docker/0123\n", v1(600 * MIB, 200 * MIB), 400),
    "version 1, no limit": ("4:memory:/\n", v1(2**63 - 4096, 200 * MIB), 8192),
}


@pytest.mark.parametrize("case", CASES)
def test_the_limit_of_a_container_counts_beside_what_the_machine_has(tmp_path: Path, case: str) -> None:
    groups, files, left = CASES[case]
    assert free_host_bytes(machine(tmp_path, groups, **files)) == left * MIB


def test_nobody_knows_where_there_is_no_proc(tmp_path: Path) -> None:
    assert free_host_bytes(tmp_path) is None


def test_this_machine_has_memory_and_texts_are_counted_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    if Path("/proc/meminfo").is_file():
        assert free_host_bytes()
    monkeypatch.setattr(room, "free_host_bytes", lambda: 4096)
    assert room.free_bytes(torch.device("cpu")) == 4096
    assert room.count_sequences(8, 1024, 4096) == 2


def test_latents_count_where_a_backend_keeps_them_in_place_of_keys_and_values() -> None:
    packed = random_model("llama", model_type="glm4_moe_lite", **LATENTS)
    a = packed.architecture
    assert a.latent is not None
    whole = 2 * a.layers * a.kv_heads * a.head_dim * 100 * 2
    row = a.layers * (a.latent.kv_rank + a.latent.turning) * 100 * 2
    for name, expected in (("cuda", row), ("cpu", whole)):
        assert cache_bytes(a, 100, "bf16", kept_latents(packed, BACKENDS[name])) == expected < 2 * whole
    first, *others = packed.layers
    site = replace(first.attention["attn_kv_b"], rule=SiteRule(torch.tensor(0.1)))
    sparse = replace(packed, layers=(with_sites(first, {"attn_kv_b": site}), *others))
    assert kept_latents(sparse, BACKENDS["cuda"]) is None
