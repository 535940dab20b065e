"""`clusterkit init`: keep hosts under a name."""

from __future__ import annotations

import typer

from clusterkit.cli import actions
from clusterkit.cli.options import new_app
from clusterkit.ssh.host_options import HostOptions

_NAMES = typer.Argument(..., metavar="HOST...", help="Hosts: a b c, a,b,c, node[01-16], user@host:port or ssh aliases.")
_KEYS = typer.Option(None, "--private-key-file", metavar="FILE", help="Private key of any type.")

app = new_app()


@app.command(
    examples="""
clusterkit init gpu[01-16] --cluster lab
clusterkit init a b --username ada --head a --cluster lab
"""
)
def init(
    names: list[str] = _NAMES,
    cluster: str = typer.Option("default", "--cluster", metavar="NAME", help="Name that the hosts are kept under."),
    head: str | None = typer.Option(None, "--head", metavar="HOST", help="Head node; the first host else."),
    storage: str | None = typer.Option(None, "--storage", metavar="FOLDER", help="Folder that all share [/storage]."),
    username: str | None = typer.Option(None, "--username", metavar="USER", help="User to log in as."),
    ssh_port: int | None = typer.Option(None, "--ssh-port", metavar="PORT", help="SSH port."),
    private_key_file: list[str] | None = _KEYS,
    bastion: str | None = typer.Option(
        None, "--bastion", metavar="[USER@]HOST[:PORT]", help="Log in through this host; several with commas."
    ),
    force: bool = typer.Option(False, "--force", help="Replace other hosts that are kept under the name."),
    as_json: bool = typer.Option(False, "--json", help="Print the result as JSON."),
) -> None:
    """Write an inventory, so that later commands need no hosts. Nothing is connected to.

    The file is YAML: edit it to give a host a private address, a network interface or a host key.
    """
    hosts = HostOptions(
        hostnames=names,
        cluster=cluster,
        private_key_file=private_key_file,
        ssh_port=ssh_port,
        username=username,
        bastion=bastion,
        head=head,
        storage=storage,
    )
    actions.init.init(hosts, cluster, force=force, as_json=as_json)
