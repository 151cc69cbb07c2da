"""vLLM for a machine with torch 2.11 of CUDA 13, a Hopper GPU and no network: an archive of 20 MB of a wheel of 280.

    python benchmarks/vllm_archive.py WHEEL ARCHIVE [--python 3.12]

WHEEL is vllm-0.24.0-cp38-abi3-manylinux_2_28_x86_64.whl (`pip download --no-deps vllm==0.24.0`), ARCHIVE a .tar.xz. It
holds two folders, `tree` (vLLM) and `packages` (what vLLM imports and such a machine lacks, by pip for --python). There
both belong behind what is installed, and are to be compiled, since a start waits for that otherwise:

    mkdir /tmp/vllm && tar -xJf ARCHIVE -C /tmp/vllm
    SITE=$(python3 -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
    printf '/tmp/vllm/tree\\n/tmp/vllm/packages\\n' > $SITE/vllm.pth
    python3 -m compileall -q -j 0 /tmp/vllm

Machine code is kept for Hopper alone, and there for dense models of 16 bits, INT8 and FP8 by CUTLASS, and slid
weights, with heads of 64 and 128: a model that calls anything else ends with an error of CUDA. Structured output is
left out, too.
notes/slide.md says how much of this has been tried.
"""

import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import click

PACKAGES = Path(__file__).with_suffix(".txt")
"""What vLLM imports beside and such a machine lacks, as pip reads it."""
STAND_INS = (
    *("xgrammar", "xgrammar.openai_tool_call_schema", "xgrammar.structural_tag", "xgrammar.testing"),
    *("llguidance", "llguidance.hf", "llguidance.torch", "outlines_core"),
)
"""Modules that vLLM names in its types, and calls for structured output alone."""
STAND_IN = """
class _Any(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return cls


class _Thing(metaclass=_Any):
    pass


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return _Thing
"""
LEFT_OUT = (
    *(
        "vllm/vllm-rs",
        "vllm/_flashmla",
        "vllm/_qutlass",
        "vllm/vllm_flash_attn/_vllm_fa2",
        "vllm/vllm_flash_attn/cute/",
    ),
    *(
        "vllm/third_party/deep_gemm/",
        "vllm/third_party/fmha_sm100/",
        "vllm/third_party/flashmla/",
        "vllm/benchmarks/datasets/",
    ),
    *("vllm/entrypoints/serve/instrumentator/static/", "vllm/model_executor/layers/fused_moe/configs/"),
)
"""How the names of files begin that are not carried."""
MACHINE_CODE = 2
HOPPER = 90
ATTENTION = {0, 1, 2, 3, 5, 8, 26, 27, 29, 32, 72, 73, 75, 78, 96, 97, 99, 102}
"""Pieces of FlashAttention 3: two that combine and plan, then heads of 128 and 64, bf16 and f16, without a soft cap."""
MACHETE = range(232, 301)
LARGE = 130_000
"""Bytes. Larger pieces are Marlin's, GPTQ's, Mamba's, and attention of former versions."""


class Piece(NamedTuple):
    """A piece of a fat binary: its number among all, what it is, for which GPU, and where its bytes are."""

    number: int
    kind: int
    architecture: int
    start: int
    length: int


KEPT: dict[str, Callable[[Piece], bool]] = {
    "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so": lambda piece: piece.number in ATTENTION,
    "vllm/_C_stable_libtorch.abi3.so": lambda piece: (
        (piece.kind, piece.architecture) == (MACHINE_CODE, HOPPER)
        and piece.length < LARGE
        and piece.number not in MACHETE
    ),
    "vllm/_moe_C_stable_libtorch.abi3.so": lambda _: False,
}


def fat_binary(library: bytes) -> tuple[int, int]:
    """Where the section `.nv_fatbin` of an ELF file begins and ends. Raises `ValueError` where it has none."""
    (table,) = struct.unpack_from("<Q", library, 40)
    size, count, of_names = struct.unpack_from("<HHH", library, 58)
    sections = [struct.unpack_from("<IIQQQQ", library, table + i * size) for i in range(count)]
    for name, _, _, _, start, length in sections:
        at = sections[of_names][4] + name
        if library[at : library.index(b"\0", at)] == b".nv_fatbin":
            return start, start + length
    raise ValueError("no .nv_fatbin")


def pieces(library: bytes) -> Iterator[Piece]:
    """All pieces of machine code and PTX of a library."""
    at, end = fat_binary(library)
    number = 0
    while (at := library.find(struct.pack("<I", 0xBA55ED50), at, end)) >= 0:
        header, length = struct.unpack_from("<HQ", library, at + 6)
        at += header
        stop = at + length
        while at < stop:
            kind, _, header, length, _, _, _, _, architecture = struct.unpack_from("<HHIQIIHHI", library, at)
            yield Piece(number, kind, architecture, at + header, length)
            at += header + length
            number += 1


def cut(library: bytes, kept: Callable[[Piece], bool]) -> bytes:
    """The library with zeros in place of all other pieces, which xz takes to nothing."""
    result = bytearray(library)
    for piece in pieces(library):
        if not kept(piece):
            result[piece.start : piece.start + piece.length] = bytes(piece.length)
    return bytes(result)


def unpack(wheel: Path, tree: Path) -> None:
    """vLLM's files, without what is not carried."""
    with zipfile.ZipFile(wheel) as packed:
        names = [name for name in packed.namelist() if not name.startswith(LEFT_OUT)]
        packed.extractall(tree, names)
    for name, kept in KEPT.items():
        path = tree / name
        path.write_bytes(cut(path.read_bytes(), kept))
        subprocess.run(["strip", "--strip-all", path], check=True)


def install(packages: Path, python: str) -> None:
    """What vLLM imports beside, and stand-ins."""
    options = ["--quiet", "--no-deps", "--no-compile", "--only-binary", ":all:", "--python-version", python]
    subprocess.run(
        [sys.executable, "-m", "pip", "install", *options, "--target", packages, "--requirement", PACKAGES], check=True
    )
    for tokenizer in (packages / "mistral_common" / "data").glob("*.json*"):
        tokenizer.unlink()
    shutil.rmtree(packages / "bin", ignore_errors=True)
    for name in STAND_INS:
        folder = packages.joinpath(*name.split("."))
        folder.mkdir()
        (folder / "__init__.py").write_text(f'"""A stand-in for {name}: any name is a class."""\n{STAND_IN}')


@click.command()
@click.argument("wheel", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("archive", type=click.Path(path_type=Path))
@click.option("--python", default="3.12", show_default=True, help="The version of Python there.")
def main(wheel: Path, archive: Path, python: str) -> None:
    """Write the archive."""
    with tempfile.TemporaryDirectory() as folder:
        tree, packages = Path(folder, "tree"), Path(folder, "packages")
        unpack(wheel, tree)
        install(packages, python)
        with tarfile.open(archive, "w:xz") as packed:
            for part in (tree, packages):
                packed.add(part, part.name)
    click.echo(f"{archive}: {archive.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
