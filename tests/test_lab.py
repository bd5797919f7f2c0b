"""`make lab`: JupyterLab on the chapters, in a real browser."""

import json
import os
import re
import signal
import subprocess
import sys

import pytest
from built import ROOT
from hub_machine import LOOPBACK, free_ports, listened, until
from processes import OWN_MAKE, process_environment

import flashlib.__main__


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """The log file and the address, token included, of `make lab` on a free port."""
    folder = tmp_path_factory.mktemp("lab")
    kinds = ("CONFIG", "DATA", "RUNTIME")
    settings = {f"JUPYTER_{kind}_DIR": str(folder / kind) for kind in kinds}
    # Opening a chapter saves a copy of it, by default next to the chapter.
    config = {"FileCheckpoints": {"checkpoint_dir": str(folder / "checkpoints")}}
    (folder / "CONFIG").mkdir()
    (folder / "CONFIG/jupyter_server_config.json").write_text(json.dumps(config))
    log = folder / "log"
    with open(log, "w") as file:
        process = subprocess.Popen(
            ["make", "lab", f"LAB_PORT={free_ports()}"],
            cwd=ROOT, env=process_environment(**OWN_MAKE, **settings), stdout=file,
            stderr=file, start_new_session=True,
        )  # fmt: skip

    def address():
        assert process.poll() is None, log.read_text()
        pattern = r"http://127\.0\.0\.1:\d+/lab\S*\?token=\w+"
        return re.search(pattern, log.read_text())

    try:
        yield log, until(address, "no address").group(0)
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(20)


def test_the_start_says_versions_gpu_and_mode(lab):
    head = lab[0].read_text().splitlines()[:3]
    assert head == flashlib.__main__.report().splitlines()
    assert re.match(
        r"flashlib \S+, Python \S+, torch \S+, triton \S+, numpy \S+$", head[0]
    )
    assert head[1].startswith("GPU: ")
    assert re.match(r"kernels: (compiled|interpreted)", head[2])


def test_without_triton_the_report_says_that_no_kernel_runs(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "flashlib.kernels", raising=False)
    monkeypatch.delattr(flashlib, "kernels", raising=False)
    first, _, last = flashlib.__main__.report().splitlines()
    assert ", no triton, " in first
    assert last.startswith("kernels: none: flashlib's kernels need Triton")


def test_it_listens_on_this_machine_alone(lab):
    port = int(re.search(r":(\d+)/", lab[1]).group(1))
    # It prints its address before it listens.
    assert until(lambda: listened([port]), "it does not listen") == {LOOPBACK}


def test_a_chapter_renders_and_runs(lab, browser):
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto(lab[1].replace("book/index.ipynb", "book/online.ipynb"))
    notebook = page.locator(".jp-Notebook")
    # Directives and numbered equations are drawn by jupyterlab-myst.
    notebook.locator("details").first.wait_for(state="attached", timeout=60_000)
    notebook.get_by_text("(1)", exact=True).first.wait_for(timeout=20_000)
    assert page.get_by_text("{exercise}").count() == 0
    assert page.locator(".lm-MenuBar-itemLabel", has_text="Nbgrader").count() == 1
    # Nothing asks to send or fetch news.
    assert page.get_by_text("official Jupyter news").count() == 0

    cell = notebook.locator(".jp-CodeCell").first
    cell.locator(".cm-content").click()
    page.keyboard.press("Control+A")
    page.keyboard.type("import flashlib, sys; print(sys.prefix)")
    page.keyboard.press("Control+Enter")
    cell.locator(".jp-OutputArea-output", has_text=sys.prefix).wait_for(timeout=60_000)
    page.close()
