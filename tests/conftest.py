"""What every test of a kernel stands on."""

import os

# cuBLAS needs a fixed workspace to be deterministic, and reads this before CUDA starts.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import pytest
import torch


@pytest.fixture
def nan_filled():
    """Every fresh tensor is NaN, so an element that a kernel forgets to write shows."""
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.utils.deterministic.fill_uninitialized_memory = filled
    torch.use_deterministic_algorithms(False)
