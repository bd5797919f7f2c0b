"""A hub for one class on one machine; `make hub` starts it, as root. How it works:
`classroom.py`.

What may differ from machine to machine comes from the environment:

    HUB_STATE       secrets, accounts' passwords (hashed), backups; for root alone
    HUB_SHARED      nbgrader's exchange and the queue for the GPU; for the class
    HUB_PORT        port on 127.0.0.1; the next two are the hub's own
    HUB_INSTRUCTOR  account of the instructor
    HUB_MEMORY_GIB, HUB_CPUS, HUB_PROCESSES   limits of each person
    HUB_GPU_SEATS   notebooks that share the GPU's memory
"""

import os
import pathlib
import sys

HUB = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HUB))
import classroom  # noqa: E402

c = get_config()  # noqa: F821
room = classroom.Room.from_environment(os.environ)
room.prepare()

c.JupyterHub.bind_url = f"http://127.0.0.1:{room.port}"
c.JupyterHub.hub_ip = "127.0.0.1"
c.JupyterHub.hub_port = room.port + 1
c.ConfigurableHTTPProxy.api_url = f"http://127.0.0.1:{room.port + 2}"
c.JupyterHub.cookie_secret_file = str(room.state / "cookie-secret")
c.JupyterHub.db_url = f"sqlite:///{room.state / 'hub.sqlite'}"
c.ConfigurableHTTPProxy.pid_file = str(room.state / "proxy.pid")
# Debian's packages of Node's modules lie where only Debian's own Node looks for them.
c.ConfigurableHTTPProxy.command = [
    "env",
    "NODE_PATH=/usr/share/nodejs",
    "configurable-http-proxy",
]

c.JupyterHub.authenticator_class = classroom.authenticator(room)
c.JupyterHub.template_paths = [classroom.templates()]
c.Authenticator.admin_users = {room.instructor}
c.Authenticator.allow_all = (
    True  # of those whom the instructor has let in, which the class sees to
)
c.NativeAuthenticator.open_signup = False
c.NativeAuthenticator.minimum_password_length = 10
c.NativeAuthenticator.check_common_password = True
c.NativeAuthenticator.allowed_failed_logins = 5
c.NativeAuthenticator.seconds_before_next_try = 60

c.JupyterHub.spawner_class = classroom.spawner(room)
c.Spawner.default_url = "/lab"
c.Spawner.cmd = [str(classroom.PROGRAMS / "jupyterhub-singleuser")]
c.Spawner.args = [
    "--MappingKernelManager.cull_idle_timeout=3600",
    "--MappingKernelManager.cull_interval=300",
]
c.Spawner.start_timeout = 120
c.Spawner.http_timeout = 120

c.JupyterHub.load_roles = [
    {
        "name": "stops-idle-servers",
        "scopes": [
            "list:users",
            "read:users:activity",
            "read:servers",
            "delete:servers",
        ],
        "services": ["idle"],
    }
]
c.JupyterHub.services = [
    {
        "name": "idle",
        "command": [
            sys.executable,
            "-m",
            "jupyterhub_idle_culler",
            "--timeout=3600",
            "--cull-every=300",
        ],
    },
    {
        "name": "backup",
        "command": [
            sys.executable,
            str(HUB / "backup.py"),
            str(room.course),
            str(room.state / "backups"),
        ],
    },
]
