"""Machine code that is not carried becomes zeros, and nothing else of a library changes."""

import struct

import pytest
from vllm_archive import Piece, cut, pieces

NAMES = b"\0.names\0.nv_fatbin\0"


def entry(kind: int, architecture: int, code: bytes) -> bytes:
    return struct.pack("<HHIQIIHHI", kind, 0, 64, len(code), 0, 0, 0, 0, architecture).ljust(64, b"h") + code


def fat(*entries: bytes) -> bytes:
    body = b"".join(entries)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def library(section: bytes, name: int = 8) -> bytes:
    """An ELF file with two sections: names, and one whose name begins at `name` of them."""
    header = bytearray(64)
    sections = struct.pack("<IIQQQQ", 1, 3, 0, 0, 192, len(NAMES)).ljust(64, b"\0")
    sections += struct.pack("<IIQQQQ", name, 1, 0, 0, 192 + len(NAMES), len(section)).ljust(64, b"\0")
    struct.pack_into("<Q", header, 40, 64)
    struct.pack_into("<HHH", header, 58, 64, 2, 0)
    return bytes(header) + sections + NAMES + section + b"behind"


def test_pieces_of_all_fat_binaries_are_numbered_together() -> None:
    whole = library(fat(entry(2, 80, b"aaaa"), entry(1, 90, b"bb")) + b"\0" * 6 + fat(entry(2, 90, b"ccc")))
    found = list(pieces(whole))
    assert [(p.number, p.kind, p.architecture) for p in found] == [(0, 2, 80), (1, 1, 90), (2, 2, 90)]
    assert [whole[p.start : p.start + p.length] for p in found] == [b"aaaa", b"bb", b"ccc"]


def test_what_is_not_kept_becomes_zeros_and_all_else_stays() -> None:
    def with_code(first: bytes) -> bytes:
        return library(fat(entry(2, 80, first), entry(2, 90, b"cccc")))

    def hopper(piece: Piece) -> bool:
        return piece.architecture == 90

    assert cut(with_code(b"aaaa"), hopper) == with_code(bytes(4))


def test_a_library_without_machine_code_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no \.nv_fatbin"):
        list(pieces(library(b"", name=1)))
