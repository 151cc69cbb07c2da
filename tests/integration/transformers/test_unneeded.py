"""Commands take torchvision for not installed, whatever it is, and programs find it as it is."""

import subprocess
import sys
from pathlib import Path

import pytest

_METADATA = "Metadata-Version: 2.1\nName: torchvision\nVersion: 0.29.1\n"
_FAILS = "raise RuntimeError('operator torchvision::nms does not exist')"  # one for another torch
_COMMAND_LINE = """
import sys
import sparsepack.cli.app
from transformers.utils import import_utils
from transformers import Gemma3ForCausalLM
assert not import_utils.is_torchvision_available() and not import_utils.is_torchvision_greater_or_equal("0.1")
assert not import_utils.is_sklearn_available()
assert "torchvision" not in sys.modules
from importlib.util import find_spec
assert find_spec("torchvision") and find_spec("sklearn"), "whoever needs them finds them"
"""
_PROGRAM = """
from transformers.utils import import_utils
assert import_utils.is_torchvision_available()
import sparsepack.cli.app
assert import_utils.is_torchvision_available() and import_utils.is_torchvision_greater_or_equal("0.1")
"""


@pytest.mark.parametrize(("code", "module"), [(_COMMAND_LINE, _FAILS), (_PROGRAM, "")], ids=["command", "program"])
def test_torchvision_is_not_imported_by_commands_and_its_version_is_understood(
    code: str, module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path, text in (("torchvision/__init__.py", module), ("torchvision-0.29.1.dist-info/METADATA", _METADATA)):
        (tmp_path / path).parent.mkdir()
        (tmp_path / path).write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
