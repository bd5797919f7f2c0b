"""The recipes under deploy/, .devcontainer/ and .github/, without their engines."""

import json
import re

import pytest
import yaml
from built import ROOT
from processes import make

WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
DOCKERFILE = (ROOT / "deploy/Dockerfile").read_text()
each_workflow = pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)


def read(name):
    return yaml.safe_load((ROOT / name).read_text())


def targets():
    """What `make` can make, among it files that the recipes name."""
    names = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    return names | {".venv/ready"}


# -- One notebook server


def test_the_image_has_a_date_no_root_no_secret_and_a_sign_of_life():
    (base,) = re.findall(r"^ARG BASE=(\S+)\nFROM \$\{BASE\}$", DOCKERFILE, re.M)
    name = r"quay\.io/jupyter/pytorch-notebook:cuda\d+-20\d\d-\d\d-\d\d"
    assert re.fullmatch(name, base) and "HEALTHCHECK" in DOCKERFILE
    assert re.findall(r"^USER (\d+)", DOCKERFILE, re.M)[-1] == "1000"
    assert not re.search(r"(?i)password|token *=", DOCKERFILE)


def test_the_image_is_made_by_make_and_nothing_else():
    """Other tests and `make SYSTEM_TORCH=1` run the same steps."""
    steps = "\n".join(re.findall(r"^RUN .*", DOCKERFILE, re.M))
    made = re.findall(r"make (?:[A-Z_]+=\S+ )*([\w./-]+)", steps)
    assert made and set(made) <= targets()
    assert "pip install" not in DOCKERFILE and "apt-get" not in DOCKERFILE
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert {".git", ".venv*", "_build"} <= set(ignored)
    copied = r"/opt/flashattention-book/((?!\.venv)[\w./-]+\w)"
    for path in re.findall(copied, DOCKERFILE):
        assert (ROOT / path).exists(), path


def test_containers_listen_on_this_machine_alone():
    compose = read("deploy/compose.yaml")
    for service in compose["services"].values():
        assert service["ports"] == ["127.0.0.1:8888:8888"]
        assert service["cap_drop"] == ["ALL"] and "environment" not in service
        build = service["build"]
        assert (ROOT / "deploy" / build["context"] / build["dockerfile"]).is_file()
    gpu = compose["services"]["lab"]["deploy"]["resources"]["reservations"]["devices"]
    assert gpu == [{"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}]
    assert "deploy" not in compose["services"]["lab-cpu"]


def test_devcontainer_takes_the_same_image():
    container = json.loads((ROOT / ".devcontainer/devcontainer.json").read_text())
    folder, build = ROOT / ".devcontainer", container["build"]
    assert (folder / build["dockerfile"]).resolve() == ROOT / "deploy/Dockerfile"
    assert (folder / build["context"]).resolve() == ROOT
    assert container["hostRequirements"] == {"gpu": "optional"}
    assert container["postCreateCommand"].split()[-1] in targets()


# -- Hubs


def test_the_cluster_opens_no_door_and_knows_no_secret():
    values = read("deploy/zero-to-jupyterhub.yaml")
    assert values["proxy"]["service"]["type"] == "ClusterIP"
    assert values["ingress"]["enabled"] is False
    assert values["hub"]["config"]["NativeAuthenticator"]["open_signup"] is False
    text = (ROOT / "deploy/zero-to-jupyterhub.yaml").read_text()
    secret = r"(?i)\b(api_?token|password|secret_?token): *\S"
    assert not re.search(secret, text)
    user = values["singleuser"]
    profiles = {profile["slug"]: profile for profile in user["profileList"]}
    limits = profiles["gpu"]["kubespawner_override"]["extra_resource_limits"]
    assert limits == {"nvidia.com/gpu": "1"}
    assert "kubespawner_override" not in profiles["cpu"] and profiles["cpu"]["default"]
    assert user["cmd"][0].startswith("/opt/flashattention-book/.venv/bin/")


# -- Workflows


@each_workflow
def test_a_workflow_asks_for_little_and_says_when_to_stop(path):
    flow = yaml.safe_load(path.read_text())
    assert flow["permissions"]["contents"] == "read"
    for name, job in flow["jobs"].items():
        for step in job.get("steps", ()):
            if "uses" in step:
                assert re.search(r"@v\d+$", step["uses"]), f"{name}: {step['uses']}"
            # Text from outside reaches a shell through variables only.
            assert "${{" not in step.get("run", ""), f"{name}: {step['run']}"


@pytest.mark.parametrize("name", ["site", "release"])
def test_what_is_published_has_passed_the_tests(name):
    jobs = read(f".github/workflows/{name}.yml")["jobs"]
    assert jobs["test"] == {"uses": "./.github/workflows/test.yml"}
    needed = ["test", "gpu"] if name == "release" else "test"
    assert (jobs["build"]["needs"], jobs["publish"]["needs"]) == (needed, "build")
    assert jobs["build"]["container"] == "debian:12"  # as in test.yml
    assert "if" not in jobs["build"] and "if" not in jobs["publish"]


def test_on_a_gpu_the_tests_of_kernels_run_compiled():
    """Most of them have no mark: without a GPU, they run in the interpreter."""
    *_, tests = read(".github/workflows/gpu.yml")["jobs"]["gpu"]["steps"]
    first, second = tests["run"].splitlines()
    assert first == "make test-library JOBS=1" and '-m "gpu and slow" tests' in second
    command = make("--dry-run", "-o", ".venv/ready", *first.split()[1:]).stdout
    assert '-m "not slow"' in command and "tests/test_flash_forward.py" in command
    assert "--timeout=600" in command and "--timeout=600" in second


@each_workflow
def test_a_workflow_calls_what_exists(path):
    text = path.read_text()
    for words in re.findall(r"^\s*(?:- run: |run: )?make ((?:\S+ ?)+)$", text, re.M):
        assert {word for word in words.split() if "=" not in word} <= targets(), words
    for name in re.findall(r"bash (\S+)", text):
        assert (ROOT / name).is_file()


def test_the_weekly_run_installs_as_the_first_cell_does():
    import notebooks

    assert '"--quiet", "git+" + BOOK]' in notebooks.SETUP
    weekly = (ROOT / ".github/workflows/rot.yml").read_text()
    assert 'pip install --quiet "git+$BOOK"' in weekly
