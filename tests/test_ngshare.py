"""Assignments on a cluster: ngshare in the versions of deploy/ngshare, with the roles
of the cluster's values.

`make test-hub` runs it. There is no cluster here: a hub, ngshare and processes with the
variables of pods run side by side in a network of their own (ngshare_room.py).
"""

import json
import re
import subprocess
import sys
import venv

import pytest
import yaml
from built import ROOT
from processes import run

FOLDER = ROOT / "deploy/ngshare"


@pytest.fixture(scope="module")
def room(tmp_path_factory):
    """(folder, what was told at each step)."""
    folder = tmp_path_factory.mktemp("ngshare")
    venv.create(folder / "env", with_pip=True)
    python = folder / "env/bin/python"
    install = [python, "-m", "pip", "install", "--quiet", "-r"]
    subprocess.run([*install, FOLDER / "requirements.txt"], check=True, timeout=300)
    # ngshare listens on all addresses: this network has one, of the machine itself.
    command = [
        "bwrap", "--die-with-parent", "--unshare-net", "--unshare-pid",
        "--dev-bind", "/", "/", "--proc", "/proc",
        sys.executable, ROOT / "tests/ngshare_room.py", folder, python,
    ]  # fmt: skip
    done = run(command)
    log = folder / "hub.log"
    said = log.read_text()[-4000:] if log.is_file() else ""
    assert done.returncode == 0, done.stdout + done.stderr + said
    return folder, json.loads((folder / "told.json").read_text())


def test_every_command_succeeds(room):
    _, told = room
    failed = {step: said for step, said in told["commands"].items() if said[0] != 0}
    assert not failed, failed


def test_answers_arrive_whole_and_under_the_right_name(room):
    folder, _ = room
    submitted = folder / "instructor/flashattention-course/submitted"
    for name in ("ada", "ben"):
        handed_in = (submitted / name / "online/online.ipynb").read_bytes()
        assert handed_in == (folder / name / "online/online.ipynb").read_bytes()
        assert f"by {name}".encode() in handed_in


def test_feedback_reaches_the_right_student_and_nobody_else(room):
    folder, _ = room
    for name in ("ada", "ben"):
        found = [page.read_text() for page in (folder / name).rglob("*.html")]
        assert found == [f"marks of {name}"]


def test_what_is_not_allowed_is_refused(room):
    asked = room[1]["requests"]
    status, body = asked.pop("the instructor reads ada's work")
    assert status == 200 and json.loads(body)["success"]
    # Whoever has no token is sent to the hub's page for signing in.
    status, page = asked.pop("a stranger asks")
    assert status in (401, 403) or ("courses" not in page and "Sign in" in page)
    for step, (status, body) in asked.items():
        refused = status == 403 and not json.loads(body)["success"]
        assert refused, (step, status, body[:200])


def test_the_manifest_and_the_values_fit_each_other():
    manifest = (FOLDER / "ngshare.yaml").read_text()
    claim, deployment, service, policy = yaml.safe_load_all(manifest)
    values = yaml.safe_load((ROOT / "deploy/zero-to-jupyterhub.yaml").read_text())
    ((name, hub_service),) = values["hub"]["services"].items()
    (port,) = service["spec"]["ports"]
    assert hub_service["url"] == f"http://{service['metadata']['name']}:{port['port']}"
    pod = deployment["spec"]["template"]
    labels = pod["metadata"]["labels"].items()
    assert service["spec"]["selector"].items() <= labels
    assert policy["spec"]["podSelector"]["matchLabels"].items() <= labels
    (container,) = pod["spec"]["containers"]
    told = {variable["name"]: variable for variable in container["env"]}
    key = told["JUPYTERHUB_API_TOKEN"]["valueFrom"]["secretKeyRef"]
    assert key == {"name": "hub", "key": f"hub.services.{name}.apiToken"}
    assert told["JUPYTERHUB_SERVICE_NAME"]["value"] == name
    assert told["JUPYTERHUB_SERVICE_PREFIX"]["value"] == f"/services/{name}/"
    assert values["singleuser"]["extraEnv"]["NGSHARE_URL"].endswith(f"/services/{name}")
    assert container["ports"] == [{"containerPort": port["port"]}]
    claimed = pod["spec"]["volumes"][0]["persistentVolumeClaim"]["claimName"]
    assert claimed == claim["metadata"]["name"]
    assert pod["spec"]["securityContext"]["runAsNonRoot"]
    assert deployment["spec"]["replicas"] == 1


def test_the_image_installs_what_the_test_ran():
    lines = (FOLDER / "Dockerfile").read_text()
    assert "pip install --no-cache-dir -r /opt/ngshare/requirements.txt" in lines
    assert re.findall(r"^USER (\d+)", lines, re.M) == ["1000"]
