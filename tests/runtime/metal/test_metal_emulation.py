"""What stands for Metal on this processor computes what Metal says, and finds what Metal leaves to chance."""

from typing import Any

import pytest
import torch
from metal_emulation import EmulationError, Library, ShaderError, compile_shader, order
from torch import Tensor

HEAD = "#include <metal_stdlib>\nusing namespace metal;\n"

FUNCTIONS = """
kernel void functions(device const int* x [[buffer(0)]], device int* out [[buffer(1)]],
                      uint index [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
    device int* to = out + 8 * index;
    const int mine = x[index];
    to[0] = simd_sum(mine);
    to[1] = simd_prefix_exclusive_sum(mine);
    to[2] = simd_max(mine);
    to[3] = simd_min(mine);
    to[4] = simd_broadcast(mine, 5);
    to[5] = simd_shuffle(mine, ushort(31 - lane));
    to[6] = simd_shuffle_xor(mine, 3);
    to[7] = int(lane);
}
kernel void places(device int* out [[buffer(0)]], uint2 group [[threadgroup_position_in_grid]],
                   uint2 groups [[threadgroups_per_grid]], uint2 inside [[thread_position_in_threadgroup]],
                   uint2 size [[threads_per_threadgroup]], uint index [[thread_index_in_threadgroup]],
                   uint simdgroup [[simdgroup_index_in_threadgroup]],
                   uint simdgroups [[simdgroups_per_threadgroup]]) {
    const uint number = (group.y * groups.x + group.x) * size.x * size.y + index;
    out[number] = int(100000 * group.y + 10000 * group.x + 1000 * inside.y + 10 * inside.x);
    out[number] += int(simdgroup + 4 * simdgroups);
}
kernel void reversed(device const float* x [[buffer(0)]], device float* out [[buffer(1)]],
                     uint group [[threadgroup_position_in_grid]], uint index [[thread_index_in_threadgroup]]) {
    threadgroup float all[64];
    all[index] = x[group * 64 + index];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    out[group * 64 + index] = all[63 - index];
}
"""

FAULTS = """
kernel void reads_beyond(device const float* x [[buffer(0)]], device float* out [[buffer(1)]],
                         uint index [[thread_index_in_threadgroup]]) {
    out[index] = x[index + 1];
}
kernel void reads_before(device const float* x [[buffer(0)]], device float* out [[buffer(1)]],
                         uint index [[thread_index_in_threadgroup]]) {
    out[index] = x[int(index) - 1];
}
kernel void writes_beyond(device const float* x [[buffer(0)]], device float* out [[buffer(1)]],
                          uint index [[thread_index_in_threadgroup]]) {
    out[index + 1] = x[index];
}
kernel void beyond_threadgroup_memory(device const float* x [[buffer(0)]], device float* out [[buffer(1)]],
                                      uint index [[thread_index_in_threadgroup]]) {
    threadgroup float first[64];
    threadgroup float second[64];
    first[index + 1] = x[index];
    second[index] = x[index];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    out[index] = first[index + 1] + second[index];
}
kernel void unset(device const float* x [[buffer(0)]], device float* out [[buffer(1)]],
                  uint index [[thread_index_in_threadgroup]]) {
    threadgroup float all[64];
    if (index > 0) all[index] = x[index];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    out[index] = all[63 - index];
}
kernel void without_barrier(device const float* x [[buffer(0)]], device float* out [[buffer(1)]],
                            uint index [[thread_index_in_threadgroup]]) {
    threadgroup float all[64];
    all[index] = x[index];
    out[index] = index ? all[index - 1] : all[0];
}
kernel void barrier_of_other_memory(device const float* x [[buffer(0)]], device float* out [[buffer(1)]],
                                    uint index [[thread_index_in_threadgroup]]) {
    out[index] = x[index];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    out[63 - index] += 1.0f;
}
kernel void writes_what_was_read(device const float* x [[buffer(0)]], device float* out [[buffer(1)]],
                                 uint index [[thread_index_in_threadgroup]]) {
    threadgroup float all[64];
    all[index] = x[index];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    out[index] = all[63 - index];
    all[index] = 0.0f;
}
kernel void adds_together(device const float* x [[buffer(0)]], device float* out [[buffer(1)]],
                          uint index [[thread_index_in_threadgroup]]) {
    out[0] += x[index];
}
kernel void of_other_threadgroups(device const float* x [[buffer(0)]], device float* out [[buffer(1)]],
                                  uint group [[threadgroup_position_in_grid]],
                                  uint index [[thread_index_in_threadgroup]]) {
    if (index == 0) out[group] = x[group];
    threadgroup_barrier(mem_flags::mem_device);
    if (index == 0 && group == 1) out[1] += out[0];
}
kernel void barrier_of_some(device const float* x [[buffer(0)]], device float* out [[buffer(1)]],
                            uint index [[thread_index_in_threadgroup]]) {
    if (index < 32) threadgroup_barrier(mem_flags::mem_threadgroup);
    out[index] = x[index];
}
kernel void two_barriers(device const float* x [[buffer(0)]], device float* out [[buffer(1)]],
                         uint index [[thread_index_in_threadgroup]]) {
    if (index < 32) {
        threadgroup_barrier(mem_flags::mem_threadgroup);
    } else {
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    out[index] = x[index];
}
kernel void sum_of_some_lanes(device const float* x [[buffer(0)]], device float* out [[buffer(1)]],
                              uint index [[thread_index_in_threadgroup]]) {
    out[index] = x[index];
    if (index % 32 < 7) out[index] = simd_sum(x[index]);
}
kernel void not_aligned(device const float* x [[buffer(0)]], device float* out [[buffer(1)]],
                        uint index [[thread_index_in_threadgroup]]) {
    out[index] = index < 63 ? *(device const float*)((device const uchar*)x + 4 * index + 2) : 0.0f;
}
"""


@pytest.fixture(scope="module")
def functions() -> Library:
    return compile_shader(HEAD + FUNCTIONS)


@pytest.fixture(scope="module")
def faults() -> Library:
    return compile_shader(HEAD + FAULTS)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_simd_functions_are_metals(functions: Library, seed: int) -> None:
    x = torch.randint(-100, 100, (64,), dtype=torch.int32)
    out = torch.empty(64, 8, dtype=torch.int32)
    with order(seed):
        functions.functions(x, out, threads=64, group_size=64)
    lanes = torch.arange(32)
    for part, found in zip(x.split(32), out.split(32), strict=True):
        expected = [
            part.sum().expand(32),
            part.cumsum(0) - part,
            part.max().expand(32),
            part.min().expand(32),
            part[5].expand(32),
            part.flip(0),
            part[lanes ^ 3],
            lanes,
        ]
        assert torch.equal(found, torch.stack([each.int() for each in expected], dim=1))


@pytest.mark.parametrize("seed", [0, 3])
def test_threads_know_their_places(functions: Library, seed: int) -> None:
    out = torch.full((6 * 96,), -1, dtype=torch.int32)
    with order(seed):
        functions.places(out, threads=[3 * 24, 2 * 4], group_size=[24, 4])
    expected = [
        100000 * y + 10000 * x + 1000 * (i // 24) + 10 * (i % 24) + i // 32 + 4 * 3
        for y in range(2)
        for x in range(3)
        for i in range(96)
    ]
    assert out.tolist() == expected


@pytest.mark.parametrize("seed", [0, 1])
def test_threads_meet_at_barriers(functions: Library, seed: int) -> None:
    x, out = torch.randn(3, 64), torch.empty(3, 64)
    with order(seed) as launches:
        functions.reversed(x, out, threads=192, group_size=64)
    assert torch.equal(out, x.flip(1))
    assert launches.launched == ["reversed"]


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("reads_beyond", "reads beyond its memory: byte 256 of buffer 0, which has 256"),
        ("reads_before", "reads beyond its memory: byte -4 of buffer 0"),
        ("writes_beyond", "writes beyond its memory: byte 256 of buffer 1, which has 256"),
        ("beyond_threadgroup_memory", "writes beyond its memory: no memory of the kernel"),
        ("unset", "reads threadgroup memory that nobody wrote"),
        ("without_barrier", "without a barrier between the two|reads threadgroup memory that nobody wrote"),
        ("barrier_of_other_memory", "without a barrier between the two: byte"),
        ("writes_what_was_read", "without a barrier between the two: threadgroup memory"),
        ("adds_together", "without a barrier between the two: byte 0 of buffer 1"),
        ("of_other_threadgroups", "what another threadgroup (writes|reads): byte 0 of buffer 1"),
        ("barrier_of_some", "32 of 64 threads come to a barrier"),
        ("two_barriers", "64 of 64 threads come to a barrier, the others do not"),
        ("sum_of_some_lanes", "7 of 32 lanes come to simd_sum"),
        ("not_aligned", "is not aligned: byte [0-9]+ of buffer 0"),
    ],
)
def test_what_metal_leaves_to_chance_is_found(faults: Library, name: str, message: str, seed: int) -> None:
    groups = 2 if name == "of_other_threadgroups" else 1
    with order(seed), pytest.raises(EmulationError, match=f"{name}: .*({message})"):
        getattr(faults, name)(torch.randn(64), torch.zeros(64), threads=64 * groups, group_size=64)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("threadgroup const float* all = x;", "cannot initialize"),
        ("device float* to = (device float*)out; to = x;", "const"),
        ("take(out);", "no matching function"),
        ("device float mine[4]; out[0] = mine[0];", "address space"),
        ("x[0] = 1.0f;", "const"),
        ("out[0] = nothing;", "nothing"),
    ],
)
def test_wrong_address_spaces_do_not_compile(body: str, message: str) -> None:
    taking = "inline void take(threadgroup float* x) { x[0] = 0; }\n"
    text = f"kernel void wrong(device const float* x [[buffer(0)]], device float* out [[buffer(1)]]) {{ {body} }}\n"
    with pytest.raises(ShaderError, match=message):
        compile_shader(HEAD + taking + text)


def _call(library: Library, *arguments: Any, **more: Any) -> None:
    library.reversed(*arguments, **{"threads": 64, "group_size": 64, **more})


@pytest.mark.parametrize(
    ("x", "more", "message"),
    [
        (torch.zeros(64, dtype=torch.float16), {}, r"reversed: x: torch.float16, expected torch.float32"),
        (torch.zeros(64, 2)[:, 0], {}, "a tensor with strides"),
        (3, {}, r"torch.int64, expected torch.float32"),
        (torch.zeros(64), {"threads": 65}, "no whole threadgroups"),
        (torch.zeros(64), {"threads": 2048, "group_size": 2048}, "multiple of 32 up to 1024"),
        (torch.zeros(64), {"threads": 48, "group_size": 48}, "multiple of 32 up to 1024"),
        (torch.zeros(64), {"threads": None}, "expected threads and group_size"),
    ],
)
def test_arguments_are_checked(functions: Library, x: Tensor | int, more: dict[str, Any], message: str) -> None:
    with pytest.raises(EmulationError, match=message):
        _call(functions, x, torch.zeros(64), **more)


def test_the_number_of_arguments_is_checked(functions: Library) -> None:
    with pytest.raises(EmulationError, match="1 arguments, expected 2"):
        _call(functions, torch.zeros(64))


def test_scalars_have_the_types_that_kernels_name() -> None:
    text = (
        "kernel void scaled(device float* out [[buffer(0)]], constant int& factor [[buffer(1)]],"
        " constant float& more [[buffer(2)]], uint index [[thread_index_in_threadgroup]]) {"
        " out[index] = float(factor) + more; }\n"
    )
    library, out = compile_shader(HEAD + text), torch.empty(32)
    library.scaled(out, -7, 0.5, threads=32, group_size=32, arg_casts={1: "int32"})
    assert (out == -6.5).all()
    with pytest.raises(EmulationError, match=r"factor: torch.int64, expected torch.int32"):
        library.scaled(out, -7, 0.5, threads=32, group_size=32)


def test_unknown_kernels_have_no_name(functions: Library) -> None:
    with pytest.raises(AttributeError, match="no kernel nothing"):
        _ = functions.nothing
