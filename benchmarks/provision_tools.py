"""The tools that benchmarks/provision.py compares, each with the settings that are fastest for it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path
from typing import Protocol

from provision_hosts import CONFIG, CONFIG_MODE, FOLDER_MODE, JSON_MODE, PACKAGES, Hosts, template

VERSIONS = ("pyinfra==3.10.*", "ansible-core==2.19.*")


class Tool(Protocol):
    """One way to do the four steps."""

    name: str

    def command(self, hosts: Hosts) -> list[str]:
        """What a user would type; files that it needs are written beside the hosts."""
        ...

    def environment(self, hosts: Hosts) -> dict[str, str]:
        """Settings."""
        ...

    def close(self, hosts: Hosts) -> None:
        """End what outlives the command."""
        ...


class Clusterkit:
    """The engine of `clusterkit setup` with four steps of its own."""

    name = "clusterkit"

    def command(self, hosts: Hosts) -> list[str]:
        return [sys.executable, str(Path(__file__).with_name("provision_clusterkit.py")), str(hosts.work())]

    def environment(self, hosts: Hosts) -> dict[str, str]:  # noqa: ARG002
        return {}

    def close(self, hosts: Hosts) -> None:
        """Nothing outlives it."""


class Pyinfra:
    """pyinfra, all hosts at once, none waiting for another between operations."""

    name = "pyinfra"

    def __init__(self, tools: Path) -> None:
        self.tools = tools

    def command(self, hosts: Hosts) -> list[str]:
        folder = hosts.folder / "pyinfra"
        folder.mkdir(exist_ok=True)
        common = {
            "ssh_user": "root",
            "ssh_key": str(hosts.servers.key),
            "ssh_known_hosts_file": str(hosts.known_hosts),
            "ssh_strict_host_key_checking": "yes",
            "ssh_allow_agent": False,
            "ssh_look_for_keys": False,
        }
        inventory = [
            (place.name, {**common, **place.as_dict(), "ssh_hostname": place.address, "ssh_port": place.port})
            for place in hosts.places
        ]
        (folder / "inventory.py").write_text(f"hosts = {inventory!r}\n")
        (folder / "app.conf").write_text(CONFIG)
        (folder / "host.json.j2").write_text(template("{{ host.name }}", "{{ host.data.folder }}"))
        (folder / "deploy.py").write_text(
            f"""from pyinfra import host
from pyinfra.operations import apt, files

data = host.data
apt.packages(name="packages", packages={PACKAGES!r})
files.directory(name="folder", path=data.folder, mode={FOLDER_MODE.lstrip("0")!r})
files.put(name="config", src="app.conf", dest=data.config, mode={CONFIG_MODE.lstrip("0")!r})
files.template(name="json", src="host.json.j2", dest=data.json, mode={JSON_MODE.lstrip("0")!r})
"""
        )
        program = str(self.tools / "bin" / "pyinfra")
        return [program, "--yes", "--no-wait", "--chdir", str(folder), "inventory.py", "deploy.py"]

    def environment(self, hosts: Hosts) -> dict[str, str]:  # noqa: ARG002
        return {}

    def close(self, hosts: Hosts) -> None:
        """Nothing outlives it."""


class Ansible:
    """ansible-core with pipelining, one fork a host, no gathering of facts and its `free` strategy."""

    name = "ansible-core"

    def __init__(self, tools: Path) -> None:
        self.tools = tools

    def command(self, hosts: Hosts) -> list[str]:
        folder = hosts.folder / "ansible"
        folder.mkdir(exist_ok=True)
        entries = {
            place.name: {"ansible_host": place.address, "ansible_port": place.port}
            | {key: str(value) for key, value in place.as_dict().items() if key in {"folder", "config", "json"}}
            for place in hosts.places
        }
        variables = {
            "ansible_user": "root",
            "ansible_python_interpreter": "/usr/bin/python3",
            "ansible_ssh_private_key_file": str(hosts.servers.key),
        }
        (folder / "inventory.json").write_text(json.dumps({"all": {"hosts": entries, "vars": variables}}))
        (folder / "app.conf").write_text(CONFIG)
        (folder / "host.json.j2").write_text(template("{{ inventory_hostname }}", "{{ folder }}"))
        tasks = [
            {"ansible.builtin.apt": {"name": PACKAGES, "state": "present"}},
            {"ansible.builtin.file": {"path": "{{ folder }}", "state": "directory", "mode": FOLDER_MODE}},
            {"ansible.builtin.copy": {"src": "app.conf", "dest": "{{ config }}", "mode": CONFIG_MODE}},
            {"ansible.builtin.template": {"src": "host.json.j2", "dest": "{{ json }}", "mode": JSON_MODE}},
        ]
        play = [{"hosts": "all", "gather_facts": False, "strategy": "free", "tasks": tasks}]
        (folder / "site.yml").write_text(json.dumps(play))
        program = str(self.tools / "bin" / "ansible-playbook")
        return [program, "-i", str(folder / "inventory.json"), str(folder / "site.yml")]

    def environment(self, hosts: Hosts) -> dict[str, str]:
        # Connections are shared by the tasks of one run (as by default); each run opens its own, as the other tools do.
        folder = hosts.folder / "ansible"
        sockets = self._sockets(hosts)
        sockets.mkdir(exist_ok=True)
        checked = f"-o UserKnownHostsFile={hosts.known_hosts} -o StrictHostKeyChecking=yes"
        return {
            "ANSIBLE_HOME": str(folder / "home"),
            "ANSIBLE_REMOTE_TEMP": str(folder / "remote"),
            "ANSIBLE_PIPELINING": "True",
            "ANSIBLE_FORKS": str(len(hosts.places)),
            "ANSIBLE_HOST_KEY_CHECKING": "True",
            "ANSIBLE_SSH_ARGS": f"-F none -o IdentitiesOnly=yes {checked} -o ControlMaster=auto -o ControlPersist=60s",
            "ANSIBLE_SSH_CONTROL_PATH_DIR": str(sockets),
        }

    def close(self, hosts: Hosts) -> None:
        for socket in self._sockets(hosts).iterdir():
            command = ["ssh", "-F", "none", "-o", f"ControlPath={socket}", "-O", "exit", "any"]
            subprocess.run(command, check=False, capture_output=True, timeout=20)
        shutil.rmtree(self._sockets(hosts))

    def _sockets(self, hosts: Hosts) -> Path:
        return hosts.folder / "cp"  # the path of a socket must be short


def install_tools(folder: Path) -> None:
    """Install pyinfra and ansible-core into an environment of their own, once."""
    stamp = folder / "installed.txt"
    if stamp.exists() and stamp.read_text().split() == list(VERSIONS):
        return
    print(f"installing {' and '.join(VERSIONS)} into {folder}", file=sys.stderr)
    if not (folder / "bin" / "python").exists():
        venv.create(folder, symlinks=True, with_pip=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--compile", *VERSIONS]
    subprocess.run(pip, check=True, timeout=900, env=clean_environment())
    stamp.write_text("\n".join(VERSIONS))


def versions(folder: Path) -> dict[str, str]:
    """Versions of the installed tools."""
    code = "import importlib.metadata as m; print(*(m.version(n) for n in ('pyinfra', 'ansible-core')))"
    run = subprocess.run(
        [str(folder / "bin" / "python"), "-c", code], check=True, capture_output=True, text=True, timeout=60
    )
    return dict(zip(("pyinfra", "ansible-core"), run.stdout.split(), strict=True))


def clean_environment() -> dict[str, str]:
    """Our environment without settings of Python or of a tool: bytecode is cached for all of them."""
    foreign = ("PYTHON", "ANSIBLE_", "PYINFRA_", "CLUSTERKIT_", "SSH_")
    return {name: value for name, value in os.environ.items() if not name.startswith(foreign)} | {"LC_ALL": "C.UTF-8"}
