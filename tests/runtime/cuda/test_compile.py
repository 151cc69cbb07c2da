"""Every kernel compiles for the oldest and the newest architectures that we promise, on a machine without a GPU."""

from functools import cache

import pytest

from sparsepack.errors import UserError
from sparsepack.runtime.cuda import compiler
from sparsepack.runtime.cuda.compiler import cubin, nvrtc_version


@cache
def _no_compiler() -> str:
    try:
        nvrtc_version()
    except UserError as error:
        return str(error)
    return ""


pytestmark = pytest.mark.skipif(bool(_no_compiler()), reason=_no_compiler())

FILES = sorted(entry.name.removesuffix(".cu") for entry in compiler.FOLDER.iterdir() if entry.name.endswith(".cu"))
VARIANTS = {
    "prefill": [
        (),
        *(("VECTOR=1", f"ROUNDS={rounds}", "ACTIVATION=3") for rounds in (1, 5)),
        *(("HEADS=1", f"HEAD_DIM={width}", f"KV={type}") for width, type in ((2, 1), (24, 3), (128, 2), (256, 1))),
    ],
    "rows_decode": [(f"TYPE={type}",) for type in range(5)],
    "rows_product": [(f"TYPE={type}", "BATCH=2", "STAGES=3") for type in range(5)],
}
"""Macros of a file, where not those that it takes by itself."""


@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize(("name", "defines"), [(n, d) for n in FILES for d in VARIANTS.get(n, [()])], ids=str)
def test_every_kernel_compiles(name: str, defines: tuple[str, ...], arch: int) -> None:
    assert cubin(name, arch, defines)[:4] == b"\x7fELF"


def test_compiled_code_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    code = cubin("collect", 80)
    monkeypatch.setattr(compiler, "_compiled", lambda *_: pytest.fail("compiled again"))
    assert cubin("collect", 80) == code


def test_a_cache_that_cannot_be_written_is_done_without(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert cubin("collect", 80)[:4] == b"\x7fELF"


def test_an_older_gpu_is_an_error() -> None:
    with pytest.raises(UserError, match=r"compute capability 7\.5: the cuda backend needs 8\.0"):
        cubin("collect", 75)
