"""vLLM is in an environment of its own, `make test-vllm`; elsewhere these tests are left out."""

import importlib.util

# Not "vllm" itself: where it is not installed this folder has that name.
collect_ignore_glob = [] if importlib.util.find_spec("vllm.version") else ["test_vllm_*.py"]
