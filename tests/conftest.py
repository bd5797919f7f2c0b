"""Fixtures of several test files."""

import os

# cuBLAS needs a fixed workspace to be deterministic, and reads this before CUDA starts.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import pytest
import torch

# Files whose tests share parsed pages, open pages, a server or compiled kernels, and so
# a process.
TOGETHER = dict.fromkeys(
    ("test_book", "test_buttons", "test_moved", "test_size"), "book"
)
ALONE = ("test_compile", "test_lab", "test_live", "test_pdf", "test_register_machine")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Deal tests out one by one, but those that share something to one process: what
    the mark xdist_group is for, which pytest-xdist 3.8 loses under pytest 9.2.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            name = os.path.basename(nodeid.split("::")[0]).removesuffix(".py")
            return TOGETHER.get(name, name if name.startswith(ALONE) else nodeid)

    if config.getoption("dist") == "loadgroup":
        return Scheduling(config, log)
    return None


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@pytest.fixture
def nan_filled():
    """Fill every fresh tensor with NaN, which shows what a kernel forgets to write."""
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.utils.deterministic.fill_uninitialized_memory = filled
    torch.use_deterministic_algorithms(False)


@pytest.fixture(params=[True, False], ids=["split", "fused"])
def deterministic(request):
    """The two forms of a backward pass."""
    return request.param


@pytest.fixture(scope="session")
def site():
    """The address of the built book, served on this machine."""
    import built

    built.require_book()
    with built.served(built.HTML) as address:
        yield address


@pytest.fixture(scope="session")
def browser():
    """Debian's Chromium, started once for all files of a run."""
    import pdf  # not at the top: a GPU host that tests kernels needs no browser
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = pdf.launch(playwright)
        yield chromium
        chromium.close()
