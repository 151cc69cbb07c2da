"""vLLM is in an environment of its own: `make test-vllm`."""

import pytest

pytest.importorskip("vllm", reason="no vLLM here; `make test-vllm` has it")
