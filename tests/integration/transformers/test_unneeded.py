"""Commands take torchvision for not installed, whatever it is, and programs find it as it is."""

from pathlib import Path

from forks_for_tests import in_forks

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


def test_torchvision_is_not_imported_by_commands_and_its_version_is_understood(tmp_path: Path) -> None:
    codes = []
    for number, (code, module) in enumerate(((_COMMAND_LINE, _FAILS), (_PROGRAM, ""))):
        folder = tmp_path / str(number)
        for path, text in (("torchvision/__init__.py", module), ("torchvision-0.29.1.dist-info/METADATA", _METADATA)):
            (folder / path).parent.mkdir(parents=True)
            (folder / path).write_text(text)
        codes.append(f"import sys\nsys.path.insert(0, {str(folder)!r})\n{code}")
    assert in_forks("import torch", codes) == ["", ""]
