"""The kernels keep the rules of Metal that a C++ compiler does not know, and each of these rules is one that can be
broken."""

import re

import pytest
from metal_lint import complaints, without_comments

from sparsepack.runtime.metal.library import FIRST, FOLDER, source

HEAD = "#include <metal_stdlib>\nusing namespace metal;\n"


def test_the_kernels_keep_metals_rules() -> None:
    assert complaints(source()) == []


def test_there_is_one_first_file_and_it_alone_includes() -> None:
    including = [file.name for file in FOLDER.iterdir() if "#include" in without_comments(file.read_text())]
    assert including == [FIRST]


def kernel(body: str = "", arguments: str = "") -> str:
    return f"{HEAD}kernel void one(device float* x [[buffer(0)]]{arguments}) {{\n{body}\n}}\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (kernel("double y = x[0];"), "words: double"),
        (kernel("auto y = x;"), "words: auto"),
        (kernel("x[0] = 0.5;"), "literals: 0.5"),
        (kernel("x[0] = 1e-5;"), "literals: 1e-5"),
        (kernel("x[0] = 3.0 * 2.0f;"), "literals: 3.0"),
        (HEAD + "inline int f(int n) { return n ? f(n - 1) : 0; }\n", "recursion: f calls itself"),
        (
            HEAD + "inline int f(int n);\ninline int g(int n) { return f(n); }\ninline int f(int n) { return g(n); }\n",
            "recursion: g",
        ),
        (kernel(arguments=", device float* y [[buffer(0)]]"), r"buffers: one: buffers \[0, 0\]"),
        (kernel(arguments=", device float* y [[buffer(2)]]"), r"buffers: one: buffers \[0, 2\]"),
        (
            kernel(arguments="".join(f", device float* x{i} [[buffer({i})]]" for i in range(1, 32))),
            "32 buffers, expected at most 31",
        ),
        (
            kernel(arguments=", uint g [[threadgroup_position_in_grid]], uint2 n [[threadgroups_per_grid]]"),
            "places: one: places as uint, uint2",
        ),
        (HEAD + "inline void f() {\n    threadgroup float all[4];\n}\n", "threadgroup_variables: 1 variables"),
        (kernel("    threadgroup float all[8193];\n    all[0] = x[0];"), "threadgroup_bytes: one: 32772 bytes"),
        (
            kernel(
                "    threadgroup float all[8000];\n    threadgroup int more[200];\n    all[0] = x[0];\n    more[0] = 1;"
            ),
            "threadgroup_bytes: one: 32800 bytes",
        ),
        (HEAD + "inline void f(float* x) { x[0] = 0; }\n", r"address_spaces: float\* x"),
        (HEAD + "inline void f(int n, const float* x) {}\n", r"address_spaces: float\* x"),
        (HEAD + "inline void f(int& n) {}\n", r"address_spaces: int& n"),
        (kernel("x[0] = *(const float*)(x + 1);"), r"address_spaces: float\*\)"),
        (HEAD + '#include "common.metal"\n', 'includes: "common.metal"'),
        (kernel("atomic_fetch_add_explicit(x, 1.0f, memory_order_relaxed);"), "atomics: atomic_fetch_add_explicit"),
    ],
)
def test_each_rule_finds_what_breaks_it(text: str, message: str) -> None:
    assert re.search(message, "\n".join(complaints(text)))


@pytest.mark.parametrize(
    "body", ["x[0] = x[1] * x[2];", "x[0] = float(int(x[1]) & 3);", "x[0] = 2.5f + 1e-5f;", "// double 0.5"]
)
def test_what_keeps_the_rules_is_let_alone(body: str) -> None:
    assert complaints(kernel(body)) == []
