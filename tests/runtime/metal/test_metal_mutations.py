"""Kernels that are broken on purpose fail the tests that whole ones pass."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
import test_metal_attention as attention_suite
import test_metal_lists as lists_suite
import test_metal_products as products_suite
from metal_emulation import EmulationError, Library, ShaderError, compile_shader

from sparsepack.runtime.metal.library import FIRST, FOLDER


@dataclass(frozen=True)
class Mutation:
    """What becomes of a kernel.

    file  -- of the kernel
    text  -- what stands there once, or in several kernels, of which the first is broken
    other -- what stands there instead
    test  -- one of the suite, given the library
    fails -- how it ends
    """

    file: str
    text: str
    other: str
    test: Callable[[Library], None]
    fails: type[Exception]


gemv = partial(products_suite.test_gemv_divides_any_number_of_columns, active=65)
several_bands = partial(
    products_suite.test_gemv_sums_the_active_columns, rows=513, columns=70, share=0.5, splits=3, simdgroups=2
)
attention = partial(
    attention_suite.test_attention_of_steps_is_the_references, heads=4, kv_heads=2, head_dim=64, window=0, chunk=256
)
windows = partial(
    attention_suite.test_attention_of_steps_is_the_references, heads=4, kv_heads=2, head_dim=64, window=3, chunk=2
)
lists = partial(lists_suite.test_collect_lists_active_columns_in_order, columns=1025, kind="everything above")
norms = partial(lists_suite.test_collect_takes_sums_norms_and_offsets, columns=1025, splits=5, bits=lists_suite.NORM)
decoded = partial(products_suite.test_decoded_bands_are_the_codecs_weights, rows=700, columns=17, first=1, bands=2)
likeliest = partial(products_suite.test_the_likeliest_is_the_lowest_of_equals, logits=[1.0, 3.0, 3.0, 2.0], expected=1)

BARRIER = "    threadgroup_barrier(mem_flags::mem_threadgroup);\n"
BOTH = "threadgroup_barrier(mem_flags::mem_device | mem_flags::mem_threadgroup);"

MUTATIONS = {
    "wrong remainder": Mutation("zigzag.metal", "each + int(number < remainder)", "each", gemv, AssertionError),
    "missing barrier": Mutation("zigzag.metal", BARRIER, "", gemv, EmulationError),
    "wrong address space": Mutation("collect.metal", "threadgroup int* found", "device int* found", lists, ShaderError),
    "off by one in a band": Mutation(
        "zigzag.metal", "4 * int(lane % 8)", "4 * int(lane % 8) + 1", several_bands, EmulationError
    ),
    "unordered sum": Mutation(
        "zigzag.metal",
        "for (uint i = 0; i < simdgroups; ++i) total += sums[i * BAND_ROWS + r];\n        to[r] = ",
        "for (uint i = 0; i < simdgroups; ++i) total += sums[i * BAND_ROWS + r];\n        to[0] += ",
        gemv,
        EmulationError,
    ),
    "another band": Mutation(
        "zigzag.metal",
        "ulong(first_band + int(group.y))",
        "ulong(first_band + int(group.y) - 1)",
        decoded,
        AssertionError,
    ),
    "barrier of threadgroup memory alone": Mutation(
        "attention.metal", BOTH, "threadgroup_barrier(mem_flags::mem_threadgroup);", attention, EmulationError
    ),
    "barrier of some": Mutation("attention.metal", BOTH, f"if (simdgroup < 4) {BOTH}", attention, EmulationError),
    "one position too many": Mutation(
        "attention.metal",
        "min(begin + chunk, position + 1)",
        "min(begin + chunk + 1, position + 1)",
        windows,
        EmulationError,
    ),
    "sum of some lanes": Mutation(
        "collect.metal",
        "squares = simd_sum(squares);",
        "if (lane < 31) squares = simd_sum(squares);",
        norms,
        EmulationError,
    ),
    "a list beyond its segment": Mutation(
        "collect.metal", "first + before", "first + before + 1024", lists, EmulationError
    ),
    "the last of equals": Mutation(
        "rows.metal",
        "order_of(found[r]) > order_of(found[at])",
        "order_of(found[r]) >= order_of(found[at])",
        likeliest,
        AssertionError,
    ),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_broken_kernel_fails(name: str) -> None:
    mutation = MUTATIONS[name]
    texts = {file: (FOLDER / file).read_text() for file in (FIRST, "collect.metal", mutation.file)}
    assert mutation.text in texts[mutation.file]
    texts[mutation.file] = texts[mutation.file].replace(mutation.text, mutation.other, 1)
    with pytest.raises(mutation.fails):
        mutation.test(compile_shader("\n".join(texts.values())))


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_whole_kernel_passes(library: Library, name: str) -> None:
    MUTATIONS[name].test(library)
