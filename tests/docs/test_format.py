"""docs/format.md: its reader reads our files, its hashes are ours, and its worked example is true."""

import hashlib
import re
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from artifacts_for_tests import write_zigzag
from models_for_tests import make_model

from sparsepack.formats.matrix import decode_matrix
from sparsepack.formats.open import read_packed
from sparsepack.models.checkpoint.checkpoint import open_checkpoint

PAGE = Path(__file__).parents[2] / "docs" / "format.md"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    write_zigzag(open_checkpoint("shipped:tiny"), {}, path)
    return path


@pytest.fixture(scope="module")
def site_matrix() -> Callable[[Path, str], np.ndarray]:
    """The function of that name in the page."""
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, Callable[[Path, str], np.ndarray]] = {}
    exec(compile(code, str(PAGE), "exec"), names)
    return names["site_matrix"]


def test_the_pages_reader_reads_every_site(tiny: Path, site_matrix: Callable[[Path, str], np.ndarray]) -> None:
    for number, layer in enumerate(read_packed(tiny).layers):
        for name, site in layer.sites.items():
            found = site_matrix(tiny, f"blk.{number}.{name}.weight")
            assert found.dtype == np.float32
            np.testing.assert_array_equal(found, decode_matrix(site.matrix).numpy())


def test_the_pages_reader_reads_tails(tmp_path: Path, site_matrix: Callable[[Path, str], np.ndarray]) -> None:
    path, widths = tmp_path / "m.gguf", {"intermediate_size": 70, "num_key_value_heads": 1, "num_hidden_layers": 1}
    write_zigzag(open_checkpoint(make_model(tmp_path / "m", "llama", **widths)), {}, path)
    (layer,) = read_packed(path).layers
    assert {name: site.matrix.rows for name, site in layer.sites.items() if site.matrix.tail is not None} == {
        "attn_in": 384,
        "mlp_in": 140,
    }
    for name, site in layer.sites.items():
        found = site_matrix(path, f"blk.0.{name}.weight")
        np.testing.assert_array_equal(found, decode_matrix(site.matrix).numpy())


def test_the_worked_example_is_true(tiny: Path, site_matrix: Callable[[Path, str], np.ndarray]) -> None:
    page = PAGE.read_text(encoding="utf-8")
    (head,) = re.findall(r"its first 16 bytes \| `(.*?)`", page)
    (weight,) = re.findall(r"\| weight \| .* = (-?[\d.]+) \|", page)
    (checkpoint,) = re.findall(r"The checkpoint has (-?[\d.]+) there", page)
    blocks = read_packed(tiny).layers[0].sites["attn_in"].matrix.blocks.reshape(-1, 144)
    assert bytes(blocks[263, :16].tolist()).hex(" ") == head
    assert blocks[263, 85] == 0x54
    assert f"{site_matrix(tiny, 'blk.0.attn_in.weight')[384 + 37, 7]:.7f}" == weight
    source = open_checkpoint("shipped:tiny").tensor("model.layers.0.self_attn.v_proj.weight")
    assert source[37, 7].item() == pytest.approx(float(checkpoint), abs=5e-5)


def test_hashes_stand_where_the_page_says(tiny: Path) -> None:
    data = tiny.read_bytes()
    (header,) = struct.unpack_from("<Q", data, 167)
    zeros = data[:68] + b"0" * 64 + data[132:header]
    assert hashlib.sha256(zeros).hexdigest().encode() == data[68:132]
    first = 768 * 256 // 256 * 210  # the embedding, in Q6_K
    assert hashlib.sha256(data[header : header + first]).hexdigest().encode() == data[231:295]


def test_q6_k_is_as_the_page_says(tiny: Path) -> None:
    embedding = read_packed(tiny).embedding
    row = embedding.blocks[300].numpy()
    (d,) = row[208:210].view("<f2").astype(np.float32)
    scale = row[192:208].view(np.int8)
    found = np.empty(256, np.float32)
    for i in range(256):
        h, place = divmod(i, 128)
        low = row[64 * h + place % 64] >> (4 if place >= 64 else 0) & 15
        high = row[128 + 32 * h + place % 32] >> 2 * (place // 32) & 3
        found[i] = d * scale[i // 16] * (int(low) + 16 * int(high) - 32)
    np.testing.assert_array_equal(found, decode_matrix(embedding)[300].numpy())
