"""The best that llama.cpp's partial offload reaches within a budget of the GPU's memory, by its own report of it.

Layers (`-ngl N`: the last N of them on the GPU) and MLPs (the attention of all on the GPU, the MLPs of the first K on
the processor: `--n-cpu-ffn K` where llama-bench has it, else by `-ot`) are swept: of each kind the largest share that
stays within the budget is timed. Counted against the budget are the buffers that llama-bench -v reports for the GPU:
weights, keys and values, and what computing takes, not the driver's context.
"""

import json
import re
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

_BUFFER = re.compile(r"CUDA\d+(?: [A-Za-z]+)? (?:model |KV |compute |output )?buffer size *= *([\d.]+) MiB")
LAYERS, MLPS = "layers", "MLPs"
COMPUTING = 350_000_000
"""About as many bytes are on the GPU beside weights, before any report says it."""
Run = Callable[[Sequence[str]], tuple[str, str]]
"""The function runs llama-bench with arguments: what it wrote on standard output and on standard error."""


@dataclass(frozen=True)
class Split:
    """A way to divide the model. arguments -- of llama-bench; bytes -- on the GPU, by its report"""

    name: str
    arguments: tuple[str, ...]
    bytes: int


@dataclass(frozen=True)
class Peer:
    """llama-bench with a file. depth, new -- tokens before those that are timed, and these; threads of the processor;
    layer, mlp -- bytes of a layer and of an MLP; kinds of splits that are tried"""

    run: Run
    path: Path
    layers: int
    depth: int
    new: int
    threads: int
    layer: int
    mlp: int
    kinds: Sequence[str] = (LAYERS, MLPS)
    _reported: dict[str, int] = field(default_factory=dict)

    def command(self, split: Sequence[str], depth: int, new: int, rounds: int) -> list[str]:
        """The arguments of a run."""
        fixed = ["-m", self.path, "-o", "json", "-v", "-fa", 1, "-ctk", "f16", "-ctv", "f16", "-ub", 64]
        mapped = ["-lm", "none"] if "--load-mode" in self._help else ["-mmp", 0]
        sizes = ["-p", 0, "-n", new, "-d", depth, "-r", rounds, "-t", self.threads, *mapped]
        return [str(each) for each in (*fixed, *sizes, *split)]

    def within(self, budget: int, rounds: int) -> dict[Split, list[float]]:
        """Of each kind, the split with most on the GPU that stays within so many bytes, and its tokens a second in the
        rounds of the run that showed it."""
        found = {}
        for name in self.kinds:
            if largest := self._largest(name, budget, rounds):
                split, speeds = largest
                found[split] = speeds
        return found

    def tokens_per_second(self, split: Split, rounds: int) -> list[float]:
        """Of each round."""
        return self._timed(split.arguments, rounds)[0]

    def _timed(self, arguments: Sequence[str], rounds: int) -> tuple[list[float], int]:
        """Tokens a second of each round, and the bytes on the GPU."""
        written, said = self.run(self.command(arguments, self.depth, self.new, rounds))
        (row,) = json.loads(written)
        return [float(value) for value in row["samples_ts"]], reported_bytes(said)

    def _largest(self, name: str, budget: int, rounds: int) -> tuple[Split, list[float]] | None:
        """The largest of 0 .. layers whose report stays within the budget. As many as should fit are tried, then as
        many more or fewer as the report of these says: a load takes long, so each is timed at once."""
        of, each, beside = self._kinds[name]
        count = min(max((budget - self._reported.get(name, beside)) // each, 0), self.layers)
        found, too_many = None, self.layers + 1
        while True:
            speeds, size = self._timed(of(count), rounds)
            self._reported[name] = size - count * each
            if size <= budget:
                found = Split(f"{name} {count}/{self.layers}", of(count), size), speeds
                following = min(count + (budget - size) // each, too_many - 1)
            else:
                too_many = count
                following = max(count - max(1, -(-(size - budget) // each)), 0)
            if following == count or (found and following < count):
                return found
            count = following

    @property
    def _kinds(self) -> dict[str, tuple[Callable[[int], tuple[str, ...]], int, int]]:
        """Of each kind the arguments for a number of layers, the bytes of each, and about what else is on the GPU."""
        attention = self.layers * (self.layer - self.mlp)
        return {LAYERS: (_layers, self.layer, COMPUTING), MLPS: (self._mlps, self.mlp, attention + COMPUTING)}

    @cached_property
    def _help(self) -> str:
        """What this llama-bench says of its options, of which some came and others went in 2026."""
        return "".join(self.run(["--help"]))

    def _mlps(self, near: int) -> tuple[str, ...]:
        """All attention on the GPU, and the MLPs of the last `near` blocks."""
        far = self.layers - near
        if "--n-cpu-ffn" in self._help:
            return ("-ngl", "999", "--n-cpu-ffn", str(far))
        blocks = "|".join(map(str, range(far)))
        return ("-ngl", "999", "-ot", rf"blk\.({blocks})\.ffn_(gate|up|down)\.weight=CPU") if far else ("-ngl", "999")


def _layers(near: int) -> tuple[str, ...]:
    # One more than the blocks is the output matrix.
    return ("-ngl", str(near))


def reported_bytes(said: str) -> int:
    """What llama.cpp's log says that it has on the GPU. Raises `RuntimeError` where the log says nothing of buffers."""
    found = [float(size) for size in _BUFFER.findall(said)]
    if not found and "buffer size" not in said:
        raise RuntimeError(f"llama-bench -v reports no buffers; it said: {said[-500:]}")
    return round(sum(found) * 2**20)


def runner(program: Path) -> Run:
    """What runs a llama-bench. Raises `RuntimeError`, with the end of what it said, where it fails."""

    def run(arguments: Sequence[str]) -> tuple[str, str]:
        done = subprocess.run([str(program), *arguments], capture_output=True, text=True, errors="replace")
        if done.returncode and arguments != ["--help"]:
            raise RuntimeError(f"{program} {' '.join(arguments)}: {done.stderr[-1000:]}")
        return done.stdout, done.stderr

    return run
