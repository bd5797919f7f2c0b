"""What tests of several files stand on."""

import os
import shutil

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


@pytest.fixture(scope="session")
def browser():
    """Debian's Chromium, started once for all files of a run."""
    from playwright.sync_api import sync_playwright  # a GPU host that tests kernels needs no browser

    executable = shutil.which("chromium")
    assert executable, "chromium is missing: sudo apt-get install -y chromium"
    flags = ["--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
    flags += ["--disable-component-update", "--disable-sync"]
    if os.geteuid() == 0:
        flags.append("--no-sandbox")  # Chromium's sandbox refuses to run as root
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=executable, args=flags)
        yield chromium
        chromium.close()
