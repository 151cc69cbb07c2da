"""vLLM lies unpacked on the path for another lane, with packages that lack others: nothing of it here."""
import sys

sys.path[:] = [each for each in sys.path if not each.startswith("/tmp/vllm")]
