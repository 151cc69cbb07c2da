"""Every kernel compiles for the oldest and the newest architectures that we promise, on a machine without a GPU."""

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from homes_for_tests import without_a_home
from pairwise import each_value
from zigzag_cases import CUDA_BLOCKS

from sparsepack.errors import UserError
from sparsepack.models.blocks import Router
from sparsepack.runtime.cuda.driver import kernel
from sparsepack.runtime.cuda.driver.kernel import cubin, kernel_files, nvrtc_version
from sparsepack.runtime.cuda.products import zigzag_products
from sparsepack.runtime.cuda.products.tile_config import CudaTileConfig, OffloadedTileConfig
from sparsepack.runtime.cuda.products.zigzag import CudaZigzag
from sparsepack.runtime.cuda.products.zigzag_products import Input, Together
from sparsepack.runtime.cuda.slide.hopper import CLUSTER, TILES


@cache
def _no_compiler() -> str:
    try:
        nvrtc_version()
    except UserError as error:
        return str(error)
    return ""


pytestmark = pytest.mark.skipif(bool(_no_compiler()), reason=_no_compiler())

DELTA_NETS = [
    (f"KEY_DIM={key}", f"VALUE_DIM={value}", f"RATIO={ratio}", f"TAPS={taps}")
    for key, value, ratio, taps in ((128, 128, 3, 4), (8, 12, 1, 3), (256, 250, 4, 5))
]
MAMBA = [
    (f"KEY_DIM={state}", f"VALUE_DIM={width}", f"RATIO={ratio}", f"TAPS={taps}", f"GROUP={group}")
    for state, width, ratio, taps, group in ((128, 64, 8, 4, 512), (14, 10, 2, 3, 30), (256, 250, 2, 5, 1000))
]
VARIANTS = {
    "offloaded_product": [
        (f"INPUTS={texts}", f"GATED={gated}", "ACTIVATION=1") for texts in (1, 3, 8) for gated in (0, 1, 2)
    ]
    + [("INPUTS=2", "GATED=1", "ACTIVATION=0", "LEVELS=5", f"OF_LEVELS={levels}") for levels in (1, 0)],
    "prefill": [
        (),
        *(("VECTOR=1", f"ROUNDS={rounds}", "ACTIVATION=3", "NORMED=1") for rounds in (1, 5)),
        *(("HEADS=1", f"HEAD_DIM={width}", f"KV={type}") for width, type in ((2, 1), (24, 3), (128, 2), (256, 1))),
        ("HEADS=1", "HEAD_DIM=128", "KV=1", "ROTARY_DIM=96", "NEIGHBOURS=1", "OUTPUT_GATES=1"),
        ("HEADS=1", "HEAD_DIM=512", "KV=1", "K_EQ_V=1"),
        ("HEADS=1", "HEAD_DIM=256", "KV=1", "SHARED_KV=1"),
        ("ACTIVATION=5",),
        *((f"VECTOR={vector}", "ROUNDS=3", "CENTRED=1") for vector in (1, 4)),
    ],
    "attention": [
        (f"HEAD_DIM={width}", f"GQA_RATIO={ratio}", f"KV={type}", f"WARPS={warps}", f"FLAG_IN_DATA={flag_in_data}")
        for width, ratio, type, warps, flag_in_data in (
            (128, 4, 1, 8, 1),
            (64, 16, 3, 8, 0),
            (80, 3, 2, 8, 1),
            (256, 12, 1, 4, 0),
        )
    ]
    + [("HEAD_DIM=130", "GQA_RATIO=15", "KV=3", f"STAGES={stages}") for stages in (2, 3)]
    + [
        ("HEAD_DIM=128", "GQA_RATIO=3", "ROTARY_DIM=96", "NEIGHBOURS=1"),
        ("HEAD_DIM=256", "GQA_RATIO=8", "ROTARY_DIM=64", "OUTPUT_GATES=1", "FLAG_IN_DATA=1"),
        ("HEAD_DIM=256", "GQA_RATIO=2", "CAPPED=1", "FLAG_IN_DATA=1"),
        ("HEAD_DIM=512", "GQA_RATIO=8", "K_EQ_V=1", "FLAG_IN_DATA=1", "WARPS=4"),
        ("HEAD_DIM=512", "GQA_RATIO=8", "SHARED_KV=1", "WARPS=4"),
        ("HEAD_DIM=30", "GQA_RATIO=3", "SHARED_KV=1", "KV=3", "CAPPED=1"),
        ("HEAD_DIM=192", "GQA_RATIO=1", "ROTARY_DIM=64", "NEIGHBOURS=1", "VALUE_DIM=128", "FLAG_IN_DATA=1"),
        (
            *("HEAD_DIM=576", "GQA_RATIO=4", "ROTARY_DIM=64", "NEIGHBOURS=1", "VALUE_DIM=512", "LATENTS=1", "WARPS=4"),
            *("KV=1", "FLAG_IN_DATA=1"),
        ),
    ],
    "double_sparsity": [
        (
            *(f"HEAD_DIM={width}", f"GQA_RATIO={ratio}", f"KV={type}", f"WARPS={warps}", "STAGES=3"),
            *(f"LABEL_WORDS={words}", f"CLUSTER={cluster}", f"SELECTS={selects}", f"ATTENDS={attends}"),
        )
        for width, ratio, type, warps, words, cluster in (
            (128, 1, 1, 16, 4, 1),
            (80, 3, 2, 8, 3, 8),
            (256, 16, 3, 4, 32, 2),
            (16, 7, 1, 8, 1, 4),
        )
        for selects, attends in ((1, 1), (1, 0), (0, 1))
    ],
    "token_slots": [(f"HEAD_DIM={width}", f"KV={type}") for width, type in ((128, 1), (6, 2), (256, 3))],
    "delta_step": [
        (*of_heads, f"ROUNDS={rounds}", f"FLAG_IN_DATA={flag}", f"X_IN_DATA={flag}")
        for of_heads, rounds, flag in ((DELTA_NETS[0], 10, 1), (DELTA_NETS[1], 1, 0), (DELTA_NETS[2], 18, 1))
    ],
    "delta_prefill": DELTA_NETS,
    "mamba_step": [(*of, f"FLAG_IN_DATA={flag}") for of, flag in zip(MAMBA, (1, 0, 1), strict=True)],
    "mamba_prefill": MAMBA,
    "state_chunks": [
        (*of_heads[:3], "RULE_WARPS=4", f"CORRECTS={corrects}")
        for of_heads, corrects in ((DELTA_NETS[0], 1), (MAMBA[0], 0), (DELTA_NETS[2], 1), (MAMBA[1], 0), (MAMBA[2], 0))
    ],
    "per_layer": [(f"ACTIVATION={number}",) for number in (0, 3)],
    "short_conv": [("TAPS=3", "FLAG_IN_DATA=1"), ("TAPS=16", "FLAG_IN_DATA=0")],
    "latent_products": [
        ("PLAIN=192", "TURNING=64", "VALUE=256", "RANK=512", "FLAG_IN_DATA=1"),
        ("PLAIN=10", "TURNING=6", "VALUE=12", "RANK=36", "FLAG_IN_DATA=0"),
    ],
    "latent_heads": [
        ("PLAIN=192", "TURNING=64", "VALUE=256", "HEAD_DIM=256", "FLAG_IN_DATA=1"),
        ("PLAIN=10", "TURNING=6", "VALUE=12", "HEAD_DIM=16", "FLAG_IN_DATA=0"),
    ],
    "labels": [(f"LABEL_WORDS={words}", f"KV={type}") for words, type in ((1, 3), (4, 1), (32, 2))],
    "grouped_product": [
        (f"BANDS={bands}", f"TOKENS={tokens}", "STAGES=4", f"ALIGNED={aligned}", f"WHOLE_TILES={whole}")
        for bands, tokens, aligned, whole in ((1, 16, 0, 1), (2, 32, 1, 0), (2, 64, 1, 1), (1, 64, 1, 1))
    ],
    "dequantise": [("AT_ONCE=4", f"BLOCK={block.lower()}") for block in CUDA_BLOCKS],
    "neuron_list": [
        (
            *(f"CLUSTER={cluster}", f"INPUTS={texts}", f"ROUNDS={rounds}", "ACTIVATION=1", f"ALL={everyone}"),
            *(f"FLAG_IN_DATA={int(texts == 1)}", f"DIVIDED={divided}", f"REPLAYED={replayed}"),
        )
        for texts, rounds, divided, replayed, cluster, everyone in (
            *((1, 4, 0, 0, 1, 0), (1, 4, 1, 0, 8, 1), (1, 4, 1, 1, 1, 1)),
            *((3, 1, 0, 0, 8, 1), (3, 1, 1, 0, 1, 1), (3, 1, 1, 1, 8, 0)),
            *((8, 7, 0, 0, 1, 0), (8, 7, 1, 0, 8, 0), (8, 7, 1, 1, 1, 1)),
        )  # any two values meet
    ],
    "neuron_ffn": [
        (
            *(f"INPUTS={texts}", f"GROUPS={groups}", f"ROUNDS={rounds}", f"SLICES={slices}"),
            *(f"SLOTS={slots}", f"BATCH={batch}", "PARTS=2"),
        )
        for texts, groups, rounds, slices, slots, batch in (
            (1, 10, 1, 3, 34, 15),
            (4, 16, 1, 1, 8, 8),
            (2, 17, 2, 1, 4, 4),
            (3, 1, 1, 16, 64, 8),
        )
    ]
    + [("INPUTS=1", "GROUPS=10", "ROUNDS=1", "SLICES=3", "SLOTS=34", "BATCH=15", "PARTS=2", "PLAIN=1")],
    "neuron_score": [(f"INPUTS={texts}",) for texts in (1, 3, 4)],
    "neuron_keep": [(f"INPUTS={texts}",) for texts in (1, 8)],
    "neuron_gates": [
        (f"INPUTS={texts}", f"GROUPS={groups}", f"WARPS={warps}", f"SLOTS={slots}", "ACTIVATION=1")
        for texts, groups, warps, slots in ((1, 10, 16, 4), (4, 16, 8, 1), (2, 1, 16, 2))
    ],
    "head_sums": [(f"INPUT={type}", f"GROUP={group}") for type, group in ((0, 1), (1, 7), (2, 4))],
    "site_counts": [
        (f"INPUT={type}", f"CRITERIA={criteria}", f"ACTIVE={type % 2}") for type, criteria in ((0, 2), (1, 1), (2, 2))
    ],
    "apply_rope": [(f"INPUT={type}",) for type in range(3)],
    "silu_times": [(f"INPUT={type}",) for type in range(3)],
    "norm_rows": [(f"INPUT={type}", f"ROUNDS={rounds}") for type, rounds in ((1, 1), (2, 32))],
    "quantise_slide": [
        (
            *(f"INPUT={type}", "FP8=0", f"OF={of}", f"WINDOWS={of // 2 - 1}"),
            *(f"THREAD_EIGHTS={eights}", f"WARPS={warps}", f"BLOCKS={blocks}"),
        )
        for type, of, eights, warps, blocks in ((0, 4, 1, 8, 1), (1, 6, 5, 16, 4), (2, 16, 16, 32, 1))
    ],
    "scale_outputs": [(f"SUMS={sums}", f"OUTPUT={output}") for sums in range(3) for output in range(3)],
    "slide_matmul": [
        (
            *(
                f"FP8={fp8}",
                f"HALF={fp8}",
                f"CLUSTER={CLUSTER}",
                f"TOKENS={tile.tokens}",
                f"GROUPS={tile.groups}",
                f"LOAD_WARPS={tile.load_warps}",
            ),
            *(f"STAGES={tile.stages}", f"OUT_BUFFERS={tile.out_buffers}"),
        )
        for fp8, tile in [(0, TILES[1]), (0, TILES[4]), *((1, tile) for tile in TILES)]
    ],
    "post_norm": [
        (f"ROUNDS={rounds}", f"FLAG_IN_DATA={flag}", f"SUMS={sums}")
        for rounds, flag, sums in ((1, 0, 1), (3, 1, 1), (6, 1, 1), (3, 1, 2), (2, 0, 2))
    ],
    "activation_norm": [
        (f"ROUNDS={rounds}", f"FLAG_IN_DATA={flag}", f"MADE={made}", f"NORMED={normed}", "ACTIVATION=4")
        for rounds, flag, made, normed in ((7, 1, 0, 1), (7, 1, 1, 1), (2, 0, 1, 1), (21, 1, 2, 0))
    ],
    "layer_norm": [(f"ROUNDS={rounds}", f"FLAG_IN_DATA={flag}") for rounds, flag in ((1, 0), (3, 1))],
    "row_norms": [(f"ROUNDS={rounds}", f"FLAG_IN_DATA={flag}", f"APART={flag}") for rounds, flag in ((1, 0), (2, 1))],
    "route": [
        (f"ROUNDS={rounds}", f"PARTS={parts}", f"FLAG_IN_DATA={flag}")
        for rounds, parts in ((1, 1), (8, 1), (33, 2))
        for flag in (0, 1)
    ],
    "rows_decode": [(f"TYPE={type}",) for type in range(6)],
    "rows_product": [(f"TYPE={type}", "BATCH=2", "STAGES=3", f"CAPPED={type % 2}") for type in range(6)],
}
"""Macros of a file, where not those that it takes by itself."""
ARCHITECTURES = {"slide_matmul": [90]}
"""Where not all."""


def _cases() -> Iterator[Any]:
    """Each file, and up to two variants of it, for one architecture each, the rest among the `long` tests."""
    for place, name in enumerate(kernel_files()):
        for number, defines in enumerate(VARIANTS.get(name, [()])):
            of_hopper = any(value.startswith("CLUSTER=") and value != "CLUSTER=1" for value in defines)
            every = [arch for arch in ARCHITECTURES.get(name, [80, 90]) if arch >= 90 or not of_hopper]
            for arch in every:
                soon = number < 2 and arch == every[(place + number) % len(every)]
                yield pytest.param(name, defines, arch, marks=[] if soon else pytest.mark.long)


@pytest.mark.parametrize(("name", "defines", "arch"), _cases(), ids=str)
def test_every_kernel_compiles(name: str, defines: tuple[str, ...], arch: int) -> None:
    assert cubin(name, arch, defines)[:4] == b"\x7fELF"


CONFIGS = (
    CudaTileConfig(1, 8, 24, 1),
    CudaTileConfig(2, 8, 16, 16),
    CudaTileConfig(8, 8, 4, 20),
    OffloadedTileConfig(4, 8, 8, 20),
    CudaTileConfig(2, 8, 0, 11),
)


@each_value(
    {
        "what": ("dense", "sparse", "per channel", "held", "held per channel", "flag in data", "gate"),
        "config": CONFIGS,
        "arch": (80, 90),
    }
)
def test_products_compile_as_they_are_launched(what: str, config: CudaTileConfig, arch: int) -> None:
    x = torch.empty(9001)
    one = torch.empty(1)
    input = {
        "dense": Input(x, norm=x),
        "sparse": Input(x, threshold=one),
        "per channel": Input(x, threshold=x, offset=x),
        "held": Input(x, norm=x, squares=one, threshold=one, scales=one, skipped=one, flag_in_data=True),
        "held per channel": Input(x, threshold=x, offset=x, scales=one, skipped=one, flag_in_data=True, gated=1),
        "flag in data": Input(x, norm=x, squares=one, threshold=one, flag_in_data=True),
        "gate": Input(x, threshold=one),
    }[what]
    matrix = CudaZigzag(torch.empty(0), 512, 9001, config, 0, 1.0, 1.0, 1.0)
    defines = zigzag_products._defines(matrix, input, 2 if what == "gate" else None)
    if (what != "gate" or config.tile_bands > 1) and (what != "dense" or config.stages):
        assert cubin("zigzag_gemv", arch, defines)[:4] == b"\x7fELF"


@each_value(
    {
        "what": ["dense", "held, flag in data"],
        "together": [
            Together(128, 8, True, False),
            Together(5, 1, False, True, 2),
            Together(256, 8, True, True, 1, False, Router(True, 8, 4, 2.5)),
            Together(66, 2, False, False, 2, False, Router(False, 3, 2, 16.0)),
            Together(128, 8, True, True, 3, False, part="shared"),
        ],
        "block": ["Q4_K", "Q6_P"],
        "arch": [90, 80],
    }
)
def test_products_of_experts_compile_as_they_are_launched(what: str, together: Together, block: str, arch: int) -> None:
    x, one = torch.empty(768), torch.empty(1)
    of_levels = torch.empty(*[together.stored][: together.added], 5, 768)
    limits = x if block == "Q4_K" else of_levels
    held = Input(x, norm=x, squares=one, threshold=limits, scales=one, skipped=one, flag_in_data=True)
    for config in (CudaTileConfig(1, 8, 24, 2), CudaTileConfig(2, 8, 16, 5)):
        matrix = CudaZigzag(torch.empty(0), 512, 768, config, 0, 1.0, 1.0, 1.0, block=block)
        activation = 0 if config.tile_bands > 1 and not together.added else None
        defines = zigzag_products._defines(matrix, Input(x) if what == "dense" else held, activation, together)
        assert block == "Q4_K" or what == "dense" or "OF_LEVELS=1" in defines
        assert cubin("zigzag_gemv", arch, defines)[:4] == b"\x7fELF"


@each_value(
    {
        "what": ("dense", "sparse", "per channel", "held", "norm", "norm of squares", "gate"),
        "inputs": (1, 3, 8),
        "config": CONFIGS[:4],
        "arch": (80, 90),
    }
)
def test_products_of_several_inputs_compile_as_they_are_launched(
    what: str, inputs: int, config: CudaTileConfig, arch: int
) -> None:
    x, weight, one = torch.empty(inputs, 9001), torch.empty(9001), torch.empty(1)
    input = {
        "dense": Input(x),
        "sparse": Input(x, threshold=one),
        "per channel": Input(x, threshold=weight, offset=weight, gated=3),
        "held": Input(x, threshold=weight, offset=weight, scales=torch.empty(inputs), skipped=torch.empty(inputs)),
        "norm": Input(x, norm=weight, threshold=one),
        "norm of squares": Input(x, norm=weight, squares=torch.empty(inputs, 600)),
        "gate": Input(x, norm=weight, squares=torch.empty(inputs, 100), threshold=one),
    }[what]
    matrix = CudaZigzag(torch.empty(0), 512, 9001, config, 0, 1.0, 1.0, 1.0)
    defines = zigzag_products._batch_defines(matrix, input, 2 if what == "gate" else None)
    if what != "gate" or config.tile_bands > 1:
        assert cubin("zigzag_batch", arch, defines)[:4] == b"\x7fELF"


@each_value(
    {
        "block, config": [
            ("Q6_K", CudaTileConfig(1, 8, 0, 32)),
            ("Q8_0", CudaTileConfig(4, 8, 8, 3)),
            ("Q6_K", CudaTileConfig(2, 8, 16, 5)),
            ("Q8_0", CudaTileConfig(1, 6, 0, 7)),
        ],
        "arch": [80, 90],
    }
)
def test_products_with_other_blocks_compile(block: str, config: CudaTileConfig, arch: int) -> None:
    x, one = torch.empty(9001), torch.empty(1)
    matrix = CudaZigzag(torch.empty(0), 512, 9001, config, 0, 1.0, 1.0, 1.0, block=block)
    alone = zigzag_products._defines(matrix, Input(x, norm=x, squares=one, threshold=x, flag_in_data=True), None)
    assert cubin("zigzag_gemv", arch, alone)[:4] == b"\x7fELF"
    if config.stages:
        several = zigzag_products._batch_defines(matrix, Input(torch.empty(8, 9001), threshold=x), None)
        assert cubin("zigzag_batch", arch, several)[:4] == b"\x7fELF"


@each_value(
    {
        "what": ("dense", "whole columns", "levels", "held", "gate"),
        "config": (CudaTileConfig(4, 8, 12, 7), CudaTileConfig(1, 8, 8, 32), CudaTileConfig(8, 8, 4, 20)),
        "arch": (80, 90),
    }
)
def test_products_with_planes_compile(what: str, config: CudaTileConfig, arch: int) -> None:
    x, one, limits = torch.empty(2, 9001), torch.empty(1), torch.empty(5, 9001)
    scales, skipped = torch.empty(2), torch.empty(2)
    input = {
        "dense": Input(x),
        "whole columns": Input(x, threshold=one),
        "levels": Input(x, norm=x, squares=x, threshold=limits, offset=x),
        "held": Input(x, threshold=limits, scales=scales, skipped=skipped),
        "gate": Input(x, threshold=limits),
    }[what]
    matrix = CudaZigzag(torch.empty(0), 512, 9001, config, 0, 1.0, 1.0, 1.0, block="Q6_P")
    activation = 2 if what == "gate" and config.tile_bands > 1 else None
    assert cubin("zigzag_gemv", arch, zigzag_products._defines(matrix, input, activation))[:4] == b"\x7fELF"
    assert cubin("zigzag_batch", arch, zigzag_products._batch_defines(matrix, input, activation))[:4] == b"\x7fELF"


@pytest.mark.parametrize("name", ["zigzag_gemv", "zigzag_batch"])
def test_a_build_for_racecheck_has_other_barriers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.empty(64)
    matrix = CudaZigzag(torch.empty(0), 512, 64, CudaTileConfig(2, 8, 16, 2), 0, 1.0, 1.0, 1.0)
    gemv = zigzag_products._defines(matrix, Input(x, threshold=x), None)
    batch = zigzag_products._batch_defines(matrix, Input(x.expand(2, -1), threshold=x), None)
    defines = gemv if name == "zigzag_gemv" else batch
    usual = cubin(name, 90, defines)
    monkeypatch.setenv("SPARSEPACK_CUDA_CHECKED", "1")
    assert cubin(name, 90, defines) != usual


def test_compiled_code_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    code = cubin("post_norm", 80)
    monkeypatch.setattr(kernel, "_compiled", lambda *_: pytest.fail("compiled again"))
    assert cubin("post_norm", 80) == code


def test_a_cache_that_cannot_be_written_is_done_without(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert cubin("post_norm", 80)[:4] == b"\x7fELF"


def test_without_a_home_kernels_are_compiled_and_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    without_a_home(monkeypatch)
    assert cubin("post_norm", 80)[:4] == b"\x7fELF"


def test_an_older_gpu_is_an_error() -> None:
    with pytest.raises(UserError, match=r"compute capability 7\.5: the cuda backend needs 8\.0"):
        cubin("post_norm", 75)
