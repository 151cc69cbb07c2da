"""The devices on which a test runs, and the marks of tests that need a GPU."""

import pytest
import torch

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
ON_CUDA = [pytest.mark.gpu, needs_cuda]
DEVICES = ["cpu", pytest.param("cuda", marks=ON_CUDA)]
