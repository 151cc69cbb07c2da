"""What `import sparsepack` tells transformers, whichever of the two is imported first."""

import subprocess
import sys

import pytest

WATCHERS = "[finder for finder in sys.meta_path if type(finder).__name__ == '_Watcher']"


@pytest.mark.parametrize(
    "first",
    [
        f"import sparsepack; assert len({WATCHERS}) == 1",
        "import transformers.modeling_utils",
        pytest.param("import transformers.quantizers.auto", marks=pytest.mark.long),
        "from transformers import PreTrainedModel, LlamaForCausalLM; import sparsepack",
    ],
)
def test_transformers_knows_us_and_no_finder_stays(first: str) -> None:
    code = f"""
import sys
{first}
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
    subprocess.run([sys.executable, "-c", code], check=True)
