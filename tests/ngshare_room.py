"""A hub with ngshare behind its proxy and three people in it, for test_ngshare.py.

``python ngshare_room.py FOLDER PYTHON``, with a PYTHON that has ngshare, plays an
assignment from its release to the feedback with nbgrader's own commands, and writes
FOLDER/told.json: ``{"commands": {step: [exit status, output]}, "requests": {step:
[status, body]}}``.
"""

import json
import os
import secrets
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import nbformat
import yaml
from built import ROOT
from hub_machine import until, wait_for

VALUES = yaml.safe_load((ROOT / "deploy/zero-to-jupyterhub.yaml").read_text())
HUB, NGSHARE = "http://127.0.0.1:8000", "http://127.0.0.1:8000/services/ngshare"
PEOPLE = ("instructor", "ada", "ben")
# A notebook server writes down its token, and stays.
SERVER = """
import os, pathlib, time
pathlib.Path("token").write_text(os.environ["JUPYTERHUB_API_TOKEN"])
time.sleep(900)
"""


def config(folder, python, seed):
    """The hub's configuration, with the roles of the cluster's values."""
    roles = VALUES["hub"]["loadRoles"].items()
    roles = [{"name": name, **role} for name, role in roles]
    scopes = ["admin:users", "admin:servers"]
    roles.append({"name": "test", "scopes": scopes, "services": ["test"]})
    command = [
        python, "-m", "ngshare", "--admins", "instructor",
        "--database", f"sqlite:///{folder}/ngshare.db", "--storage", f"{folder}/files",
    ]  # fmt: skip
    service = {"name": "ngshare", "url": "http://127.0.0.1:8080", "command": command}
    lines = {
        "JupyterHub.bind_url": HUB,
        "JupyterHub.db_url": f"sqlite:///{folder}/hub.sqlite",
        "JupyterHub.cookie_secret_file": f"{folder}/cookie",
        "JupyterHub.authenticator_class": "dummy",
        "JupyterHub.spawner_class": "jupyterhub.spawner.SimpleLocalProcessSpawner",
        "SimpleLocalProcessSpawner.home_dir_template": f"{folder}/{{username}}",
        "Spawner.cmd": [sys.executable, "-c", SERVER],
        "Spawner.http_timeout": 600,
        # Its servers never answer.
        "JupyterHub.tornado_settings": {"slow_spawn_timeout": 1},
        "Authenticator.allow_all": True,
        "ConfigurableHTTPProxy.command": [
            "env", "NODE_PATH=/usr/share/nodejs", "configurable-http-proxy",
        ],
        "ConfigurableHTTPProxy.pid_file": f"{folder}/proxy.pid",
        "JupyterHub.services": [service, {"name": "test", "api_token": seed}],
        "JupyterHub.load_roles": roles,
    }  # fmt: skip
    settings = [f"c.{name} = {value!r}\n" for name, value in lines.items()]
    return "".join(["c = get_config()\n", *settings])


def ask(address, token, data=None):
    """(status, body) of a request; POST where there are data."""
    headers = {"Authorization": f"token {token}"}
    request = urllib.request.Request(address, data, headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


class Person:
    def __init__(self, folder, name):
        self.name, self.home = name, folder / name
        self.token = (self.home / "token").read_text()
        teaches = name == "instructor"
        self.work = self.home / "flashattention-course" if teaches else self.home
        self.work.mkdir(exist_ok=True)

    def run(self, *command):
        """[exit status, output] of a command in the person's folder, as in a pod."""
        environment = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "LANG": "C.UTF-8",
            "HOME": str(self.home), "USER": "jovyan",
            "JUPYTERHUB_USER": self.name, "JUPYTERHUB_API_TOKEN": self.token,
            "NGSHARE_URL": NGSHARE,
            "JUPYTER_CONFIG_PATH": str(ROOT / "deploy/jupyter"),
        }  # fmt: skip
        options = {"capture_output": True, "text": True, "timeout": 120}
        run = subprocess.run(command, cwd=self.work, env=environment, **options)
        return [run.returncode, run.stdout + run.stderr]

    def nbgrader(self, *command):
        return self.run(sys.executable, "-m", "nbgrader", *command)


def play(people):
    """The steps of one assignment, and what each said."""
    instructor, ada, ben = people
    manage = str(Path(sys.executable).parent / "ngshare-course-management")
    course = "flashattention"
    made = instructor.run(manage, "create_course", course, "instructor")
    told = {"course": made}
    for person in (ada, ben):
        told[f"{person.name} enrolled"] = instructor.run(
            manage, "add_student", course, person.name, "--no-gb"
        )
    page = instructor.work / "release/online/online.ipynb"
    page.parent.mkdir(parents=True)
    cells = [nbformat.v4.new_markdown_cell("for everybody")]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), page)
    told["added"] = instructor.nbgrader("db", "assignment", "add", "online")
    told["released"] = instructor.nbgrader("release_assignment", "online")
    for person in (ada, ben):
        told[f"{person.name} fetched"] = person.nbgrader("fetch_assignment", "online")
        mine = person.work / "online/online.ipynb"
        mine.write_text(mine.read_text().replace("for everybody", f"by {person.name}"))
        told[f"{person.name} submitted"] = person.nbgrader("submit", "online")
    told["collected"] = instructor.nbgrader("collect", "online")
    for person in (ada, ben):
        feedback = instructor.work / "feedback" / person.name / "online"
        feedback.mkdir(parents=True)
        (feedback / "online.html").write_text(f"marks of {person.name}")
        handed_in = instructor.work / "submitted" / person.name / "online/timestamp.txt"
        (feedback / "timestamp.txt").write_text(handed_in.read_text())
    told["feedback released"] = instructor.nbgrader("release_feedback", "online")
    for person in (ada, ben):
        got = person.nbgrader("fetch_feedback", "online")
        told[f"{person.name} got feedback"] = got
    work = f"{NGSHARE}/submission/{course}/online/ada"
    marks = f"{NGSHARE}/feedback/{course}/online/ada?timestamp=x"
    forged = f"{NGSHARE}/assignment/{course}/forged"
    asked = {
        "the instructor reads ada's work": ask(work, instructor.token),
        "ben reads ada's work": ask(work, ben.token),
        "ben reads ada's marks": ask(marks, ben.token),
        "ben releases": ask(forged, ben.token, data=b"files=[]"),
        "a stranger asks": ask(f"{NGSHARE}/courses", secrets.token_hex(16)),
    }
    return {"commands": told, "requests": asked}


def main(folder, python):
    folder, seed = Path(folder), secrets.token_hex(16)
    (folder / "hub.py").write_text(config(folder, python, seed))
    with open(folder / "hub.log", "w") as log:
        command = [sys.executable, "-m", "jupyterhub", "--config", folder / "hub.py"]
        hub = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        for place in (f"{HUB}/hub/api", f"{NGSHARE}/healthz"):
            wait_for(place, hub)
        for name in PEOPLE:
            for place in (f"users/{name}", f"users/{name}/server"):
                status, said = ask(f"{HUB}/hub/api/{place}", seed, data=b"")
                assert status in (201, 202), (place, status, said)
            token = folder / name / "token"
            until(lambda path=token: path.is_file() and path.read_text(), f"no {token}")
        told = play([Person(folder, name) for name in PEOPLE])
        (folder / "told.json").write_text(json.dumps(told))
    finally:
        hub.terminate()
        hub.wait(30)


if __name__ == "__main__":
    main(*sys.argv[1:])
