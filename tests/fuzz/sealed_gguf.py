"""A GGUF of ours taken apart, changed, and put together with hashes that are right again."""

import hashlib
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from random import Random

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from sparsepack.files.hashing import NO_HASH
from sparsepack.formats.containers.gguf import HEADER_BYTES, HEADER_HASH, TENSOR_HASHES, seal
from tests.fuzz.mutate import bytes_changed, json_changed

_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_STRING, _ARRAY, _U64 = 8, 9, 10
_JSON = ("sparsepack.manifest", "sparsepack.architecture", "sparsepack.config", "sparsepack.tokenizer")
_FLOATS = [struct.pack("<f", value) for value in (float("nan"), float("inf"), -1.0, 0.0, 1e38, -1e-38)]


@dataclass
class Gguf:
    """pairs: [key, type, bytes of the value]; tensors: [name, dimensions, type, bytes]."""

    pairs: list[list]
    tensors: list[list]
    alignment: int

    def write(self, path: Path) -> None:
        """Write it with our hashes first, all of them right."""
        path.write_bytes(b"")
        body, offsets = b"", []
        for *_, data in self.tensors:
            offsets.append(len(body))
            body += data + bytes(-len(data) % self.alignment)
        # Of the bytes that a reader will take for the tensor's, whatever its shape says now.
        ends = [offset + _bytes(*tensor[1:]) for offset, tensor in zip(offsets, self.tensors, strict=True)]
        hashes = [hashlib.sha256(body[a:b]).hexdigest() for a, b in zip(offsets, ends, strict=True)]
        blank = struct.pack("<IQ", _STRING, len(hashes)) + _string(NO_HASH) * len(hashes)
        ours = [
            [HEADER_HASH, _STRING, _string(NO_HASH)],
            [HEADER_BYTES, _U64, bytes(8)],
            [TENSOR_HASHES, _ARRAY, blank],
        ]
        pairs = ours + [pair for pair in self.pairs if pair[0] not in (HEADER_HASH, HEADER_BYTES, TENSOR_HASHES)]
        header = b"GGUF" + struct.pack("<IQQ", 3, len(self.tensors), len(pairs))
        for key, kind, value in pairs:
            header += _string(key) + struct.pack("<I", kind) + value
        for (name, dimensions, kind, _), offset in zip(self.tensors, offsets, strict=True):
            header += _string(name) + struct.pack(f"<I{len(dimensions)}QIQ", len(dimensions), *dimensions, kind, offset)
        header += bytes(-len(header) % self.alignment)
        path.write_bytes(header + body)
        seal(path, header, hashes, NO_HASH)


def read(data: bytes) -> Gguf:
    """Take a file apart that is whole."""
    tensor_count, pair_count = struct.unpack_from("<QQ", data, 8)
    at, pairs, infos = 24, [], []
    for _ in range(pair_count):
        key, at = _text(data, at)
        kind = struct.unpack_from("<I", data, at)[0]
        end = _skip(data, at + 4, kind)
        pairs.append([key, kind, data[at + 4 : end]])
        at = end
    for _ in range(tensor_count):
        name, at = _text(data, at)
        count = struct.unpack_from("<I", data, at)[0]
        *dimensions, kind, offset = struct.unpack_from(f"<{count}QIQ", data, at + 4)
        at += 4 + 8 * count + 12
        infos.append((name, dimensions, kind, offset))
    values = {key: value for key, _, value in pairs}
    alignment = int.from_bytes(values.get("general.alignment", b"\x20"), "little")
    start = at + -at % alignment
    return Gguf(pairs, [[n, d, k, data[start + o : start + o + _bytes(d, k)]] for n, d, k, o in infos], alignment)


def _bytes(dimensions: list[int], kind: int, data: bytes = b"") -> int:
    """How long a tensor is by its shape and type; of an unknown type, as long as it was."""
    if kind not in set(GGMLQuantizationType):
        return len(data)
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    return math.prod(dimensions) // block * size


def changed(random: Random, gguf: Gguf) -> Gguf:
    """A copy with something changed that a writer could have written."""
    pairs, tensors = [list(pair) for pair in gguf.pairs], [list(tensor) for tensor in gguf.tensors]
    for _ in range(random.choice((1, 1, 2))):
        kind = random.randrange(10)
        if kind < 5:
            pair = random.choice([pair for pair in pairs if pair[0] in _JSON])
            pair[2] = _string(json_changed(random, pair[2][8:].decode("utf-8", "surrogatepass")))
        elif kind == 5:
            _pair_changed(random, pairs)
        elif kind == 6:
            tensor = random.choice(tensors)
            what = random.randrange(4)
            if what == 0:
                tensor[1] = [random.choice((1, 2, 256, size * 2, 2**40)) for size in tensor[1]]
            elif what == 1:
                tensor[2] = random.choice((0, 1, 12, 14, 30, 8, 99))
            elif what == 2:
                tensor[0] = random.choice((random.choice(tensors)[0], "x", "blk.0.attention.x", "blk.9.attn_in.weight"))
            else:
                tensors.remove(tensor)
        elif kind == 7:
            random.shuffle(tensors)
        else:
            tensor = random.choice(tensors)
            if random.random() < 0.6:
                at = 4 * random.randrange(max(1, len(tensor[3]) // 4))
                tensor[3] = tensor[3][:at] + random.choice(_FLOATS) + tensor[3][at + 4 :]
            else:
                tensor[3] = bytes_changed(random, tensor[3])
    return Gguf(pairs, tensors, gguf.alignment)


def _pair_changed(random: Random, pairs: list[list]) -> None:
    pair = random.choice(pairs)
    what = random.randrange(4)
    if what == 0:
        pairs.remove(pair)
    elif what == 1:
        pair[0] = random.choice((random.choice(pairs)[0], "x", "general.alignment"))
    elif what == 2:
        pair[1], pair[2] = random.choice(
            (
                (4, b"\xff\xff\xff\xff"),
                (7, b"\x02"),
                (8, _string("x")),
                (6, _FLOATS[0]),
                (10, b"\xff" * 8),
                (9, struct.pack("<IQ", 8, 0)),
            )
        )
    elif pair[1] == _STRING:
        pair[2] = _string(bytes_changed(random, pair[2][8:]).decode(errors="replace"))
    else:
        pair[2] = bytes(random.randrange(256) for _ in pair[2]) if pair[1] in _SIZES else pair[2]


def _string(text: str) -> bytes:
    encoded = text.encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(encoded)) + encoded


def _text(data: bytes, at: int) -> tuple[str, int]:
    length = struct.unpack_from("<Q", data, at)[0]
    return data[at + 8 : at + 8 + length].decode(), at + 8 + length


def _skip(data: bytes, at: int, kind: int) -> int:
    """Where the value that begins at `at` ends."""
    if kind in _SIZES:
        return at + _SIZES[kind]
    if kind == _STRING:
        return at + 8 + struct.unpack_from("<Q", data, at)[0]
    inner, length = struct.unpack_from("<IQ", data, at)
    at += 12
    if inner in _SIZES:
        return at + length * _SIZES[inner]
    for _ in range(length):
        at = _skip(data, at, inner)
    return at
