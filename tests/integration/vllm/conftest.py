"""vLLM is in an environment of its own, `make test-vllm`; elsewhere these tests are left out."""

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("vllm") else ["test_*.py"]
