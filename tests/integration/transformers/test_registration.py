"""What `import sparsepack` tells transformers, whichever of the two is imported first."""

import pytest
from forks_for_tests import in_forks

WATCHERS = "[finder for finder in sys.meta_path if type(finder).__name__ == '_Watcher']"


FOUND = """
from transformers.utils import is_scipy_available, is_sklearn_available, is_torch_available
found = is_scipy_available(), is_sklearn_available(), is_torch_available()
"""

FIRST = [
    f"import sparsepack; assert len({WATCHERS}) == 1",
    "import transformers.modeling_utils",
    "from transformers import PreTrainedModel, LlamaForCausalLM; import sparsepack",
    "import transformers.quantizers.auto",
]
THEN = f"""
from transformers import AttentionInterface, AttentionMaskInterface, LlamaForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
import sparsepack
assert "sparsepack_double" in ALL_ATTENTION_FUNCTIONS.valid_keys()
assert "sparsepack_double" in AttentionInterface().valid_keys()
assert "sparsepack_double" in AttentionMaskInterface().valid_keys()
assert "sparsepack" in AUTO_QUANTIZER_MAPPING
assert not {WATCHERS}
"""


@pytest.mark.parametrize("firsts", [FIRST[:1], pytest.param(FIRST[1:], marks=pytest.mark.long)], ids=str)
def test_transformers_knows_us_and_no_finder_stays(firsts: list[str]) -> None:
    assert in_forks("import torch, sympy, scipy.stats", [f"import sys\n{first}\n{THEN}" for first in firsts]) == [
        ""
    ] * len(firsts)


@pytest.mark.long
def test_commands_alone_do_without_what_no_command_needs() -> None:
    """lm-eval has installed scikit-learn and scipy here, which a command of its own tasks still imports."""
    programs = [
        f"import sparsepack\n{FOUND}\nassert found == (True, True, True), found",
        f"import sparsepack.cli.app\n{FOUND}\nassert found == (False, False, True), found\nimport sklearn, scipy",
    ]
    assert in_forks("import torch", programs) == ["", ""]
