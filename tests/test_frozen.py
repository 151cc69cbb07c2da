"""What `pack` writes and what engines make of it, as it was when `data/frozen.json` was written.

A change that means to move code changes nothing here. One that means to change bytes or tokens writes the file anew:

    python tests/test_frozen.py [FILE] [--all]

`--all` adds cases whose bytes depend on the machine, since floating point sums do: those with a calibration. They are
compared on one machine, before and after a change:  SPARSEPACK_FROZEN=FILE pytest tests/test_frozen.py
"""

import argparse
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from commands_for_tests import succeeds
from gguf import GGUFReader
from models_for_tests import EXPERTS, SMALL, edit_config, make_model, row
from safetensors import safe_open

import sparsepack
from sparsepack.data import SHIPPED_MODELS

pytestmark = pytest.mark.long  # each format has tests of its own

FROZEN = Path(os.environ.get("SPARSEPACK_FROZEN", Path(__file__).parent / "data" / "frozen.json"))
PROMPT = "It was a cold evening, and"
TOKENS = 12
"""Tokens that are written greedily after the prompt."""
LOGITS, CLOSE, SHARE = 8, 2e-2, 2e-3
"""So many logits are kept, which may differ from one processor to another by CLOSE, or by this share of the largest
one: each instruction set reads prompts with its own 14 to 16 bits of a value."""
BACKENDS = ("reference", "cpu")


@dataclass(frozen=True)
class Case:
    """A model, by a name that the tests ship or by family and seed, and the options by which it is packed.

    pruned     -- whether 6 of 8 weights are kept first, by size
    calibrated -- whether `pack` has a calibration: then bytes depend on the machine
    """

    source: str
    pack: str
    pruned: bool = False
    calibrated: bool = False

    @property
    def name(self) -> str:
        return f"{self.source}{', 6 of 8' * self.pruned}: pack {self.pack}{' --calibration' * self.calibrated}"


def _cases() -> Iterator[Case]:
    for source in (
        "shipped:tiny",
        "shipped:tiny-mixture",
        *(f"{family}/0" for family in SMALL | EXPERTS),
    ):
        dense = source != "shipped:tiny-mixture" and source.split("/")[0] not in EXPERTS
        yield Case(source, "--format zigzag-q4_k")
        yield Case(source, "--format zigzag-q4_k --sparsity 0.5", calibrated=True)
        family = source.split("/")[0]
        for format in ("q4_k", "bf16") if family not in SMALL | EXPERTS or row(family).gguf is not None else ():
            yield Case(source, f"--format {format}")
        for format in ("slide-int8", "slide-fp8", "slide-bf16") if dense else ():
            yield Case(source, f"--format {format}", pruned=True)
    for format in ("zigzag-q6_k", "zigzag-q8_0"):
        for source in ("shipped:tiny", "shipped:tiny-mixture", "llama/0"):
            yield Case(source, f"--format {format}")
    for format in ("f16", "f32", "zigzag-q4_k --output-type q8_0 --embedding-type q8_0"):
        yield Case("shipped:tiny", f"--format {format}")
    for options in ("--sparsity 0.5 --allocation global --refit", "--attention double --tokens 1/4 --sparsity 0"):
        yield Case("shipped:tiny", f"--format zigzag-q4_k {options}", calibrated=True)
    yield Case("shipped:tiny", "--format q4_k", calibrated=True)
    yield Case("shipped:tiny", "--format slide-int8", pruned=True, calibrated=True)
    yield Case("relu", "--format zigzag-q4_k")
    for gates in ("zigzag", "rows"):
        yield Case("relu", f"--format neuron-q4_k --gates {gates}", calibrated=True)


CASES = {case.name: case for case in _cases()}


class Folder:
    """The models, calibrations and artifacts of the cases, made when they are needed."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def artifact(self, case: Case) -> Path:
        output = self.path / hashlib.sha256(case.name.encode()).hexdigest()[:12]
        model = self._pruned(case.source) if case.pruned else self._model(case.source)
        given = ["--calibration", self._calibration(case.source, model)] if case.calibrated else []
        succeeds("pack", model, *case.pack.split(), *given, "-o", output)
        return output

    def _model(self, source: str) -> Path:
        path = self.path / source.replace("/", "-").replace(":", "-")
        family, _, seed = source.partition("/")
        if path.exists():
            return path
        if seed:
            return make_model(path, family, int(seed))
        shutil.copytree(SHIPPED_MODELS["shipped:tiny" if source == "relu" else source], path)
        if source == "relu":
            edit_config(path, hidden_act="relu")
        return path

    def _pruned(self, source: str) -> Path:
        path = self.path / f"{self._model(source).name}-pruned"
        if not path.exists():
            succeeds("prune", self._model(source), "--keep", 6, "--of", 8, "--method", "magnitude", "-o", path)
        return path

    def _calibration(self, source: str, model: Path) -> Path:
        path = self.path / f"{model.name}-calibration"
        if not path.exists():
            options = ("--samples", 8, "--context", 128, "--held-out", 2)
            succeeds("calibrate", model, "--text", "shipped:train", *options, "-o", path)
        return path


def tensor_hashes(artifact: Path) -> Iterator[tuple[str, str]]:
    """Return the type, shape and bytes of each tensor, as a hash, by its name."""
    if artifact.is_dir():
        with safe_open(artifact / "model.safetensors", "pt") as file:
            for name in sorted(file.keys()):
                tensor = file.get_tensor(name)
                bytes = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
                yield name, _hash(tensor.dtype, tensor.shape, bytes)
        return
    for tensor in GGUFReader(artifact).tensors:
        yield tensor.name, _hash(tensor.tensor_type.name, tensor.shape.tolist(), tensor.data.tobytes())


def _hash(type: Any, shape: Any, data: Any) -> str:
    return hashlib.sha256(f"{type} {[*shape]} ".encode() + bytes(data)).hexdigest()


def measured(case: Case, artifact: Path) -> dict[str, Any]:
    """Return the hash of all tensors, and of an artifact that our engines run what each writes and its last logits."""
    hashes = sorted(tensor_hashes(artifact))
    found: dict[str, Any] = {"tensors": len(hashes), "sha256": _hash("", [], json.dumps(hashes).encode())}
    if "zigzag" in case.pack or "neuron" in case.pack:
        for backend in BACKENDS:
            model = sparsepack.load(artifact, backend=backend, context=64, threads=2)
            written = model.generate(PROMPT, tokens=TOKENS, temperature=0)
            text = "".join(written)
            logits = model.logits(PROMPT + text, sparse_from=8)[-1]
            found[backend] = {"text": text, "logits": [round(value, 4) for value in logits[:LOGITS].tolist()]}
    return found


def assert_same(found: dict[str, Any], frozen: dict[str, Any]) -> None:
    """Fail where bytes or tokens are not those that were frozen, or logits are not close."""
    for backend in BACKENDS:
        logits = [each.get(backend, {}).pop("logits", []) for each in (found, frozen)]
        largest = max((abs(logit) for logit in logits[1]), default=0.0)
        assert logits[0] == pytest.approx(logits[1], abs=max(CLOSE, SHARE * largest))
    assert found == frozen


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return Folder(tmp_path_factory.mktemp("frozen"))


@pytest.mark.parametrize("name", json.loads(FROZEN.read_text()) if FROZEN.exists() else ())
def test_bytes_tokens_and_logits_are_as_they_were(name: str, folder: Folder) -> None:
    assert_same(measured(CASES[name], folder.artifact(CASES[name])), json.loads(FROZEN.read_text())[name])


def main() -> None:
    """Write the file anew."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", type=Path, default=Path(__file__).parent / "data" / "frozen.json")
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--only", nargs="+", help="families whose cases are measured; the others stay as they are")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as path:
        folder, frozen = Folder(Path(path)), json.loads(given.file.read_text()) if given.only else {}
        for case in CASES.values():
            if given.only and case.source.split("/")[0] not in given.only:
                continue
            if given.all or not case.calibrated:
                frozen[case.name] = measured(case, folder.artifact(case))
                print(case.name, frozen[case.name]["sha256"][:8], flush=True)
    given.file.write_text(json.dumps(frozen, indent=1) + "\n")


if __name__ == "__main__":
    main()
