"""site_counts: the kernel of the tree and the new one (t1_site_counts.cu.txt), in turns; same integers? ms by shape and data; what binds the new one.

Variants of the new one that count wrongly, to see what binds: without atomics (xor of addresses kept), and with addresses that
never meet in a bank."""

from pathlib import Path

import torch

HERE = Path(".lease/lanes")
TO = Path("sparsepack/runtime/cuda/kernels/calibration")
new = (HERE / "t1_site_counts.cu.txt").read_text()
COUNT = "atomicAdd((u32*)((u8*)histogram + bytes), 1u);"
assert COUNT in new
OTHER = {
    "new": new,
    "no_atomics": new.replace(COUNT, "kept ^= bytes;")
    .replace(
        "// Count what lies",
        "__device__ u32 sink;\nstatic __device__ __forceinline__ u32& kept_of() { return sink; }\n// Count what lies",
    )
    .replace(
        "template <bool OF_HALVES>\n__device__ __forceinline__ void count(u32* histogram, u32 distance)",
        "template <bool OF_HALVES>\n__device__ __forceinline__ void count(u32& kept, u32 distance)",
    )
    .replace("count<HALVES>(of_sizes, size[i])", "count<HALVES>(kept, size[i])")
    .replace("count<false>(of_scores, score[i])", "count<false>(kept, score[i])")
    .replace("    u32 values = 0;\n", "    u32 values = 0, kept = 0;\n")
    .replace("    u64* const to = counts", "    if (kept == 0x12345678) sink = 1;\n    u64* const to = counts"),
    "no_conflicts": new.replace(
        COUNT, "atomicAdd((u32*)((u8*)histogram + (bytes & ~127u | threadIdx.x % 32 * 4)), 1u);"
    ),
}


def names():
    for name, text in OTHER.items():
        (TO / f"site_counts_{name}.cu").write_text(text)


def run(name, x, norms, active, out):
    from sparsepack.runtime.cuda.calibration import INPUTS
    from sparsepack.runtime.cuda.driver.kernel import blocks_at_once, kernel, launch

    windows, seen, columns = x.shape
    tokens, bins = windows * seen, 16385
    sizes = 8196 if x.dtype == torch.bfloat16 else 16384
    shared = 4 * (sizes + 16384 + 8192)
    function = kernel(
        f"site_counts_{name}", "site_counts", (f"INPUT={INPUTS[x.dtype]}", "CRITERIA=2", f"ACTIVE={int(active)}"), 0
    )
    at_once = blocks_at_once(function, x.device, 1024, shared)
    tiles = -(-tokens // 256) * -(-columns // 256)
    counts, squares, of_columns, of_tokens = out
    launch(
        function,
        (min(tiles, at_once), 1),
        1024,
        x,
        tokens,
        columns,
        seen,
        x.stride(0) // columns,
        norms,
        counts,
        squares,
        of_columns if active else None,
        of_tokens if active else None,
        shared=shared,
    )


def outputs(x):
    windows, seen, columns = x.shape
    tokens = windows * seen
    return (
        torch.zeros(2, 16385, dtype=torch.int64, device="cuda"),
        torch.empty(-(-tokens // 256), columns, dtype=torch.float64, device="cuda"),
        torch.zeros(columns, dtype=torch.int64, device="cuda"),
        torch.zeros(tokens, dtype=torch.int32, device="cuda"),
    )


def old(x, norms, active):
    from sparsepack.runtime.cuda.calibration import count_site

    return count_site(x, norms, 16385, active)


def ms(run, times=25):
    for _ in range(3):
        run()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(times)]
    for a, b in events:
        a.record()
        run()
        b.record()
    torch.cuda.synchronize()
    return sorted(a.elapsed_time(b) for a, b in events)[times // 2]


def data(kind, windows, seen, columns, dtype):
    generator = torch.Generator("cuda").manual_seed(columns + windows)
    x = torch.randn(windows, seen + 4, columns, device="cuda", generator=generator)
    if kind == "relu":
        x = x.relu() * (torch.rand(x.shape, device="cuda", generator=generator) < 0.2)
    if kind == "gated":
        x = torch.nn.functional.silu(x) * torch.randn(x.shape, device="cuda", generator=generator)
    if kind == "tiny":
        x = x * torch.logspace(-45, 38, columns, device="cuda")
    return x.to(dtype)[:, 4:], torch.rand(columns, device="cuda", generator=generator) + 0.5


RESULT = ""


def remove():
    for name in OTHER:
        (TO / f"site_counts_{name}.cu").unlink(missing_ok=True)


def main(say):
    names()
    try:
        compile_all()
        compared(say)
    finally:
        remove()


def compile_all():
    from sparsepack.runtime.cuda.driver.kernel import compile_together

    compile_together(each_once)


def each_once():
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for active in (False, True):
            x, norms = torch.zeros(1, 8, 64, device="cuda", dtype=dtype), torch.zeros(64, device="cuda")
            old(x, norms, active)
            for name in OTHER if dtype == torch.bfloat16 else ("new",):
                run(name, x, norms, active, outputs(x))


def count_site_new(x, norms, bins, active):
    windows, seen, columns = x.shape
    if x.stride(2) != 1 or x.stride(1) != columns or x.stride(0) % columns:
        x = x.contiguous()
    counts, squares, of_columns, of_tokens = out = outputs(x)
    run("new", x, norms, active, out)
    return counts, squares.sum(0), of_columns if active else None, of_tokens if active else None


def compared(say):
    right = True
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for kind, windows, seen, columns in (
            ("normal", 3, 300, 256),
            ("relu", 2, 511, 1000),
            ("gated", 8, 2044, 4096),
            ("tiny", 2, 333, 2048),
            ("normal", 2, 7, 33),
            ("normal", 200, 1, 40),
        ):
            x, norms = data(kind, windows, seen, columns, dtype)
            for active in (False, True):
                o = outputs(x)
                run("new", x, norms, active, o)
                e = old(x, norms, active)
                same = torch.equal(o[0], e[0]) and torch.equal(o[1].sum(0).view(torch.int64), e[1].view(torch.int64))
                if active:
                    same = same and torch.equal(o[2], e[2]) and torch.equal(o[3].long(), e[3].long())
                if not same:
                    right = False
                    say(
                        f"COUNTS DIFFER: {dtype} {kind} {windows, seen, columns} active {active}: bins {(o[0] != e[0]).sum().item()} squares {(o[1].sum(0) != e[1]).sum().item()}"
                    )
    global RESULT
    RESULT = "COUNTS SAME" if right else "COUNTS OTHER"
    say(RESULT)
    say("ms, bfloat16, 8 windows of 2044; GB/s of its bytes")
    for kind, columns in (("normal", 4096), ("gated", 14336), ("relu", 14336), ("normal", 8192)):
        x, norms = data(kind, 8, 2044, columns, torch.bfloat16)
        active = columns == 14336
        o = outputs(x)
        found = {}
        for name in ("tree", "new", "no_atomics", "no_conflicts", "tree", "new"):
            try:
                t = ms((lambda: old(x, norms, active)) if name == "tree" else (lambda: run(name, x, norms, active, o)))
                found[name] = min(t, found.get(name, 9e9))
            except Exception as error:
                say(name, "FAILED", str(error)[:300])
        say(
            f"{kind} {columns} active={active}: "
            + ", ".join(f"{n} {t:.3f} ms ({x.numel() * 2 / t / 1e6:.0f} GB/s)" for n, t in found.items()),
            "(tree: with its zeros and sums)",
        )


if __name__ == "__main__":
    main(print)
