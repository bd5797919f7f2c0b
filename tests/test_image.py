"""The image of deploy/Dockerfile: built on a Debian base, started, used in a browser.

`make test-image` runs it as root. The container and the browser share a network
namespace with the loopback device alone. Then a hub starts the image for each of two
students.
"""

import contextlib
import json
import os
import platform
import re
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pdf
import pytest
from built import ROOT
from hub_machine import free_ports, until, wait_for
from playwright.sync_api import TimeoutError, sync_playwright
from processes import make, output, run

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="makes a root file system")

PLACE = "/opt/flashattention-book"
BASE_PACKAGES = "python3,python3-venv,python3-dev,gcc,libc6-dev,make"
USER = 'chroot "$1" useradd --uid 1000 --gid 100 --create-home jovyan'
# Without these a container fails where the limits of this process may not be raised.
LIMITS = ["--ulimit=nofile=1024:1024", "--ulimit=nproc=4096:4096"]
STORAGE = '[storage]\ndriver = "vfs"\ngraphroot = "{0}/graph"\nrunroot = "{0}/run"\n'
WAIT_MS = 120_000

# A hub that starts each person's server as the chart of Zero to JupyterHub does: the
# image, the command of its values, and the hub's variables.
HUB = """
c.JupyterHub.bind_url = f"http://127.0.0.1:{port}"
c.JupyterHub.hub_port = port + 1
c.ConfigurableHTTPProxy.api_url = f"http://127.0.0.1:{port + 2}"
c.ConfigurableHTTPProxy.command = [
    "env", "NODE_PATH=/usr/share/nodejs", "configurable-http-proxy"
]
c.JupyterHub.db_url = "sqlite://"
c.JupyterHub.authenticator_class = "dummy"
c.DummyAuthenticator.password = password
c.Authenticator.allow_all = True
c.JupyterHub.spawner_class = "simple"
c.SimpleLocalProcessSpawner.home_dir_template = folder + "/{username}"
c.Spawner.cmd = command
c.Spawner.env_keep = ["PATH", "HOME", "CONTAINERS_STORAGE_CONF"]
c.Spawner.start_timeout = c.Spawner.http_timeout = 120
c.Spawner.default_url = "/lab/tree/book/primer.ipynb"
"""

# What a container without a network finds: its devices and the way to two addresses.
REACH = """
import errno, os, socket
said = [sorted(os.listdir("/sys/class/net"))]
for address in (("192.0.2.1", 443), ("127.0.0.1", PORT)):
    try:
        socket.create_connection(address, timeout=5)
        said.append("reached")
    except OSError as error:
        said.append(errno.errorcode[error.errno])
print(*said)
"""


def done(command, seconds=600, **options):
    """What a command printed; AssertionError with its messages if it fails."""
    return output(run(command, seconds, **options)).strip()


def wheels(folder):
    """Every package of the image for Debian's Python, by the pip settings of this
    machine: the build then needs neither these settings nor a network.
    """
    python = folder / "env/bin/python"
    done(["/usr/bin/python3", "-m", "venv", folder / "env"])
    done([python, "-m", "pip", "install", "wheel"])
    collect = [python, "-m", "pip", "wheel", "--wheel-dir", folder / "wheels"]
    lists = ["-r", "requirements.txt", "-r", "deploy/requirements.txt"]
    done([*collect, *lists, "-c", "constraints.txt"], 900, cwd=ROOT)
    done([*collect, "--no-deps", "-r", "deploy/ngshare/client.txt"], cwd=ROOT)
    return folder / "wheels"


class Container:
    """The running image: its volume on this machine, and its namespace's browser."""

    def __init__(self, folder):
        self.name, self.folder = "flashattention-book-test", folder
        start = ["podman", "--runtime=runc", "run", "--detach", "--network=none"]
        start += ["--name", self.name, *LIMITS, "--cap-drop=all"]
        start += ["--security-opt=no-new-privileges", "--no-healthcheck"]
        start += [f"--volume=notebooks:{PLACE}/book", "flashattention-book"]
        done(start)
        mounted = "{{.Mountpoint}}"
        found = ["podman", "volume", "inspect", "--format", mounted, "notebooks"]
        self.book = Path(done(found))

    def python(self, code):
        inside = ["podman", "--runtime=runc", "exec", self.name]
        return done([*inside, f"{PLACE}/.venv/bin/python", "-c", code])

    def token(self):
        def found():
            logs = run(["podman", "logs", self.name])
            return re.search(r"/lab\S*\?token=(\w+)", logs.stdout + logs.stderr)

        return until(found, "no address")[1]

    def browser(self, playwright):
        """Chromium in the container's network namespace."""
        process = done(["podman", "inspect", "--format", "{{.State.Pid}}", self.name])
        enter = f"nsenter --net=/proc/{process}/ns/net"
        program = self.folder / "bin/chromium"
        program.parent.mkdir()
        chromium = shlex.quote(shutil.which("chromium"))
        program.write_text(f'#!/bin/sh\nexec {enter} {chromium} "$@"\n')
        program.chmod(0o755)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
            return pdf.launch(playwright)


@pytest.fixture(scope="module")
def container(tmp_path_factory):
    folder = tmp_path_factory.mktemp("image")
    (folder / "storage.conf").write_text(STORAGE.format(folder))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CONTAINERS_STORAGE_CONF", str(folder / "storage.conf"))
        try:
            suite = platform.freedesktop_os_release()["VERSION_CODENAME"]
            base = ["mmdebstrap", "--variant=minbase", f"--include={BASE_PACKAGES}"]
            base += [f"--customize-hook={USER}", suite, folder / "base.tar"]
            done(base)
            done(["podman", "import", folder / "base.tar", "base:debian"])
            (folder / "base.tar").unlink()
            mounted = f"--volume={wheels(folder)}:/wheels:ro --network=host"
            values = "BASE=localhost/base:debian", "SYSTEM_TORCH=0"
            values += "PIP_FIND_LINKS=/wheels", "PIP_NO_INDEX=1"
            options = [mounted, *(f"--build-arg={value}" for value in values)]
            # Docker, if there is one, does not know the base.
            nowhere = {"DOCKER_HOST": "unix:///nowhere"}
            output(make("image", f"IMAGE_OPTIONS={' '.join(options)}", **nowhere))
            yield Container(folder)
        finally:
            run(["podman", "--runtime=runc", "rm", "--all", "--force", "--time=5"])
            shutil.rmtree(folder)


@pytest.fixture(scope="module")
def playwright():
    with sync_playwright() as started:
        yield started


@pytest.fixture(scope="module")
def page(container, playwright):
    """A page that has signed in."""
    token = container.token()
    browser = container.browser(playwright)
    page = browser.new_page(viewport={"width": 1400, "height": 1000})
    page.set_default_timeout(WAIT_MS)
    for word in ("not the token", token):
        page.goto("http://127.0.0.1:8888/lab")
        page.fill("#password_input", word)
        page.click("#login_submit")
        if word != token:
            page.get_by_text("Invalid credentials").wait_for()
    page.wait_for_selector("#jp-main-dock-panel")
    yield page
    browser.close()


def run_all(page, container, path):
    """Run all cells of the volume's notebook in the browser; returns its code cells."""
    file = container.book / path
    notebook = json.loads(file.read_text())
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            cell.update(outputs=[], execution_count=None)
    file.write_text(json.dumps(notebook))
    # A workspace of its own: JupyterLab opens again what was open in the last one.
    space = f"lab/workspaces/{file.stem}/tree/book/{path}"
    page.goto(f"http://127.0.0.1:8888/{space}")
    page.locator(".jp-Notebook .jp-CodeCell").first.wait_for()
    page.locator(".jp-Notebook-ExecutionIndicator[data-status=idle]").wait_for()
    cells = notebook["cells"]
    for second in range(300):
        if second % 20 == 0 and not any(c.get("execution_count") for c in cells):
            # The command does nothing until the notebook is the current document.
            page.click(".lm-MenuBar-itemLabel:text-is('Run')")
            page.click(".lm-Menu-itemLabel:text-is('Run All Cells')")
        page.wait_for_timeout(1000)
        page.keyboard.press("Control+s")
        try:
            cells = json.loads(file.read_text())["cells"]
        except json.JSONDecodeError:
            continue  # JupyterLab empties the file before it writes it again
        cells = [c for c in cells if c["cell_type"] == "code" and "".join(c["source"])]
        outputs = [output for cell in cells for output in cell["outputs"]]
        errors = [o for o in outputs if o["output_type"] == "error"]
        assert not errors, errors[0]["evalue"]
        if all(cell["execution_count"] for cell in cells):
            return cells
    waiting = [cell["source"] for cell in cells if not cell["execution_count"]]
    raise AssertionError(f"{len(waiting)} cells did not end; the first: {waiting[0]}")


def test_the_container_reaches_nothing_but_itself(container):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        said = container.python(REACH.replace("PORT", str(port)))
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
    assert said == "['lo'] ENETUNREACH ECONNREFUSED"


def test_the_image_keeps_no_settings_of_this_machine(container):
    code = "import os; print([n for n in os.environ if n.startswith('PIP_')])"
    assert container.python(code) == "[]"
    code = """import os
places = "/etc/pip.conf", "~/.cache/pip", "~/.config/pip", "/wheels/torch", \\
    "~root/.cache"
there = [p for p in places if os.path.exists(os.path.expanduser(p))]
print(there, os.listdir("/wheels"))"""
    assert container.python(code) == "[] []"


def test_a_chapter_runs_to_its_end(container, page):
    cells = run_all(page, container, "flash2.ipynb")
    said = json.dumps(cells)
    assert len(cells) > 10 and ": holds" in said and ": fails" not in said


@pytest.fixture
def hub(container):
    """The address of a hub, and the password that it takes from everybody."""
    folder, port, password = container.folder / "hub", free_ports(), "let me in, please"
    folder.mkdir()
    command = ["podman", "--runtime=runc", "run", "--rm", "--network=host", *LIMITS]
    command += ["--cap-drop=all", "--security-opt=no-new-privileges"]
    command += ["--env=JUPYTERHUB_*", "flashattention-book"]
    command += [f"{PLACE}/.venv/bin/jupyterhub-singleuser"]
    values = port, password, str(folder), command
    given = f"port, password, folder, command = {values!r}"
    (folder / "config.py").write_text(given + HUB)
    start = [sys.executable, "-m", "jupyterhub", "--config", "config.py"]
    log = folder / "log"
    with open(log, "w") as file:
        process = subprocess.Popen(start, cwd=folder, stdout=file, stderr=file)
    try:
        wait_for(f"http://127.0.0.1:{port}/hub/health", process)
        yield f"http://127.0.0.1:{port}", password
    finally:
        process.terminate()
        process.wait(60)
        print(log.read_text()[-6000:])


def test_a_hub_starts_the_image_for_each_student(container, playwright, hub):
    site, password = hub
    browser = pdf.launch(playwright)
    for student in ("ada", "ben"):
        page = browser.new_context().new_page()
        page.set_default_timeout(WAIT_MS)
        page.goto(f"{site}/hub/login")
        page.fill("#username_input", student)
        page.fill("#password_input", password)
        page.click("#login_submit")
        page.locator(".jp-Notebook-ExecutionIndicator[data-status=idle]").wait_for()
        cell = page.locator(".jp-Notebook .jp-CodeCell").first
        cell.locator(".cm-content").click()
        page.keyboard.press("Control+A")
        # What one student stores, the other does not see.
        store = f"os.makedirs('mine/{student}', exist_ok=True)"
        page.keyboard.type(f"import os, flashlib; {store}; ")
        page.keyboard.type("print(os.listdir('mine'), flashlib.__file__)")
        said = f"['{student}'] {PLACE}/flashlib/__init__.py"
        output = cell.locator(".jp-OutputArea-output").get_by_text(said)
        for _ in range(WAIT_MS // 5000):
            # The key does nothing until the notebook is the current document.
            page.keyboard.press("Control+Enter")
            with contextlib.suppress(TimeoutError):
                output.wait_for(timeout=5000)
                break
        assert output.is_visible()
    running = done(["podman", "ps", "--format", "{{.Image}}"]).splitlines()
    assert len([name for name in running if "flashattention-book" in name]) == 3
    browser.close()
