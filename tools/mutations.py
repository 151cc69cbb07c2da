"""Whether the fast tests notice faults: each mutation below puts one into the source, and its tests must fail.

    python tools/mutations.py             # every mutation, one after the other
    python tools/mutations.py sampling    # those of these names

Mutations are made in the working tree, one at a time, and taken back; so nothing else may use the tree meanwhile, and
the files must hold no changes of their own. The tests run as `make test` chooses them. A mutation is found by its text
alone, wherever its file was moved.
"""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCES = ("*.py", "*.inc", "*.h", "*.cpp", "*.cu", "*.cuh")
FAILED = 1
"""Pytest's exit status where tests failed; another one means that none ran."""


@dataclass(frozen=True)
class Mutation:
    """A fault.

    old   -- a text that stands in the source once
    new   -- what takes its place
    tests -- paths of which at least one test must fail
    """

    name: str
    old: str
    new: str
    tests: tuple[str, ...]


MUTATIONS = (
    Mutation(
        "thresholds",
        "{key for key, rule in self.rules.items() if not rule.dense}",
        "{key for key, rule in self.rules.items() if rule.dense}",
        ("tests/sparsity/test_thresholds.py",),
    ),
    Mutation(
        "histogram",
        "inside = (target - below[index - 1]) / counts[index]",
        "inside = (target - below[index]) / counts[index]",
        ("tests/calibration/collectors/test_histogram.py",),
    ),
    Mutation(
        "rounding",
        ".mul(x).round_().clamp_(-STEPS, STEPS)",
        ".mul(x).trunc_().clamp_(-STEPS, STEPS)",
        ("tests/formats/codecs/test_block_codecs.py",),
    ),
    Mutation(
        "zigzag",
        "q4_k.decode(blocks[band], dtype).t()[: whole - top]",
        "q4_k.decode(blocks[band], dtype).t().flip(0)[: whole - top]",
        ("tests/formats/codecs/test_zigzag.py",),
    ),
    Mutation(
        "integrity",
        "bad = [name for name, fine in zip(file.tensors, good, strict=True) if not fine]",
        "bad = [name for name, fine in zip(file.tensors, good, strict=True) if not fine][1:]",
        ("tests/formats/containers/test_integrity.py",),
    ),
    Mutation(
        "manifest",
        "if schema > SCHEMA:",
        "if schema > SCHEMA + 1:",
        ("tests/formats/zigzag/test_zigzag_gguf.py", "tests/formats/containers"),
    ),
    Mutation(
        "atomic",
        "    finally:\n        remove(temporary)\n",
        "    finally:\n        pass\n",
        ("tests/files/test_atomic.py",),
    ),
    Mutation(
        "resume",
        'intact = state.pop("sha256") == hash_of(state)',
        'intact = bool(state.pop("sha256"))',
        ("tests/workers/test_resume.py",),
    ),
    Mutation(
        "pruning",
        "order[..., : pattern.keep], True)",
        "order[..., -pattern.keep :], True)",
        ("tests/pruning/test_methods.py",),
    ),
    Mutation(
        "slide",
        "positions.append(position)",
        "positions.append(position.flip(1))",
        ("tests/formats/codecs/test_slide.py",),
    ),
    Mutation(
        "perplexity",
        'return width // 2 if protocol == "decode" or second_half else 0',
        'return width // 4 if protocol == "decode" or second_half else 0',
        ("tests/eval/test_perplexity.py",),
    ),
    Mutation(
        "sampling",
        "kept = int((cumulative < self.sampling.top_p * total).sum()) + 1",
        "kept = int((cumulative < self.sampling.top_p * total).sum()) + 2",
        ("tests/runtime/test_sampling.py",),
    ),
    Mutation(
        "stop",
        "_, at, self.found = min(found)",
        "_, at, self.found = max(found)",
        ("tests/runtime/test_stopping.py",),
    ),
    Mutation(
        "queue",
        "pushed_out = self._make_room(client) if self._count >= most else None",
        "pushed_out = self._make_room(client) if self._count > most else None",
        ("tests/serve/test_worker.py", "tests/serve/test_under_load.py"),
    ),
    Mutation(
        "truncate",
        "virtual void truncate(int64_t length) { length_ = length; }",
        "virtual void truncate(int64_t length) { length_ = length + 1; }",
        ("tests/runtime/test_kv_cache.py",),
    ),
    Mutation(
        "heads",
        "grouped = q.reshape(keys.shape[0], -1, head_dim)",
        "grouped = q.flip(0).reshape(keys.shape[0], -1, head_dim)",
        ("tests/runtime/reference/test_reference.py",),
    ),
    Mutation(
        "budget",
        "return min(seen, max(share, self.sinks + self.recent))",
        "return min(seen, share)",
        ("tests/models/records/test_token_policy.py",),
    ),
    Mutation(
        "placement",
        "np.copyto(last, np.float32(token + 2), where=needed > 0)",
        "np.copyto(last, np.float32(token + 2), where=needed == 0)",
        ("tests/placement/test_policies.py",),
    ),
    Mutation(
        "links",
        "candidates = sorted({least, min(least + 1, offloaded), offloaded})",
        "candidates = sorted({0, offloaded})",
        ("tests/placement/test_links.py",),
    ),
    Mutation(
        "gate",
        "worst = max(measured, key=partial(_badness, sign))",
        "worst = min(measured, key=partial(_badness, sign))",
        ("tests/recipe/test_gates.py",),
    ),
    Mutation(
        "kernel",
        "store(x + half + i, second * c + first * s);",
        "store(x + half + i, second * c - first * s);",
        ("tests/runtime/test_kv_cache.py",),
    ),
    Mutation(
        "whole-texts",
        "return max(self.policy.budget(seen), min(seen, self.largest_whole))",
        "return self.policy.budget(seen)",
        ("tests/runtime/cuda/test_double_sparsity_room.py",),
    ),
    Mutation(
        "geometry",
        "spared = row * (1 - shape.policy.tokens)",
        "spared = row * shape.policy.tokens",
        ("tests/runtime/cuda/test_double_sparsity_room.py",),
    ),
    Mutation(
        "fold",
        "                piece = piece * scale\n",
        "                piece = piece / scale\n",
        ("tests/rotation/test_exact.py",),
    ),
    Mutation(
        "rotation",
        "    if not error <= bound:\n",
        "    if not error <= 1:\n",
        ("tests/rotation/test_rotate_run.py",),
    ),
    Mutation(
        "residual",
        "x = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)",
        "x = h * torch.rsqrt(h.square().mean() + eps)",
        ("tests/calibration/collectors/test_residual.py",),
    ),
    Mutation(
        "procrustes",
        "return FoundBasis(left @ right, residual",
        "return FoundBasis((left @ right).t(), residual",
        ("tests/rotation/test_exact.py", "tests/formats/test_rotated_again.py"),
    ),
)


def source_of(mutation: Mutation) -> Path:
    """The file that a mutation changes. Raises `ValueError` unless its text stands in one file, once."""
    files = (file for pattern in SOURCES for file in (ROOT / "sparsepack").rglob(pattern))
    found = [(file, count) for file in files if (count := file.read_text(encoding="utf-8").count(mutation.old))]
    if sum(count for _, count in found) != 1:
        places = ", ".join(f"{file.relative_to(ROOT)} ({count})" for file, count in found) or "no file"
        raise ValueError(f"expected once in the source, found in {places}: {mutation.old!r}; give it another text")
    return found[0][0]


def run_tests(tests: tuple[str, ...]) -> int:
    """Pytest's exit status for the fast ones of these tests."""
    marks = ["-m", "not slow and not long and not gpu"]
    options = ["-q", "-x", "-p", "no:cacheprovider", *marks]
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *tests], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    return ran.returncode


def build(source: Path) -> None:
    """Compile the kernels where a source in C++ changed."""
    if "native" in source.parts:
        subprocess.run(["make", "build"], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def outcome(mutation: Mutation) -> str:
    """What became of a mutation: "caught", or what is wrong."""
    try:
        source = source_of(mutation)
    except ValueError as error:
        return f"NOT FOUND: {error}"
    was = source.read_bytes()
    try:
        source.write_bytes(was.replace(mutation.old.encode(), mutation.new.encode()))
        build(source)
        status = run_tests(mutation.tests)
    finally:
        source.write_bytes(was)
        os.utime(source)
        build(source)
    if status == FAILED:
        return "caught"
    return "MISSED" if status == 0 else f"NO TEST RAN: pytest ended with {status}"


def main() -> None:
    """Run the mutations that the arguments name, or all; exit status 1 unless each is caught."""
    asked = set(sys.argv[1:])
    if unknown := asked - {mutation.name for mutation in MUTATIONS}:
        sys.exit(f"no mutation {', '.join(sorted(unknown))}; there are {', '.join(each.name for each in MUTATIONS)}")
    chosen = [mutation for mutation in MUTATIONS if not asked or mutation.name in asked]
    tests = tuple(dict.fromkeys(path for mutation in chosen for path in mutation.tests))
    if status := run_tests(tests):
        sys.exit(f"without any mutation pytest ends with {status}: {' '.join(tests)}; the tests must pass first")
    caught = 0
    for mutation in chosen:
        found = outcome(mutation)
        caught += found == "caught"
        print(f"{mutation.name:<11} {found}", flush=True)
    print(f"{caught} of {len(chosen)} caught")
    sys.exit(caught != len(chosen))


if __name__ == "__main__":
    main()
