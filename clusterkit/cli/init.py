"""`clusterkit init`: keep hosts under a name."""

from __future__ import annotations

import typer

from clusterkit.provision.ray.current import option
from clusterkit.ssh.host_options import HostOptions
from clusterkit.ssh.selection import cluster_of
from clusterkit.ui import output

_NAMES = typer.Argument(..., metavar="HOST...", help="Hosts: a b c, a,b,c, node[01-16], user@host:port or ssh aliases.")
_KEYS = typer.Option(None, "--private-key-file", metavar="FILE", help="Private key of any type.")

app = typer.Typer(rich_markup_mode=None, add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})


@app.command()
def init(
    names: list[str] = _NAMES,
    cluster: str = typer.Option("default", "--cluster", metavar="NAME", help="Name to keep them under."),
    head: str | None = typer.Option(None, "--head", metavar="HOST", help="Head node; the first host else."),
    storage: str | None = typer.Option(None, "--storage", metavar="FOLDER", help="Folder that all share [/storage]."),
    username: str | None = typer.Option(None, "--username", metavar="USER", help="User to log in as."),
    ssh_port: int | None = typer.Option(None, "--ssh-port", metavar="PORT", help="SSH port."),
    private_key_file: list[str] | None = _KEYS,
    bastion: str | None = typer.Option(None, "--bastion", metavar="[USER@]HOST[:PORT]", help="Log in through it."),
    force: bool = typer.Option(False, "--force", help="Replace other hosts that are kept under the name."),
    as_json: bool = typer.Option(False, "--json", help="Print the result as JSON."),
) -> None:
    """Write an inventory, so that later commands need no hosts. Nothing is connected to.

    The file is YAML: edit it to give a host a private address, a network interface or a host key.
    """
    from clusterkit.hosts import inventory  # noqa: PLC0415
    from trainer.errors import UserError  # noqa: PLC0415

    path = inventory.path_of(cluster)
    wanted = cluster_of(
        HostOptions(
            hostnames=names,
            cluster=cluster,
            private_key_file=private_key_file,
            ssh_port=ssh_port,
            username=username,
            bastion=bastion,
            head=head,
            storage=storage,
        )
    )
    kept = inventory.load(cluster) if path.exists() else None
    if kept is not None and kept != wanted and not force:
        there = ", ".join(host.name for host in kept.hosts)
        raise UserError(
            f"the cluster '{cluster}' is kept with other settings (hosts {there}) in {path}.\n"
            "Add --force to replace it, or keep the new one under another name: --cluster NAME"
        )
    if kept != wanted:
        inventory.save(wanted)
    if as_json:
        output.result_json({"path": str(path), "changed": kept != wanted, "cluster": wanted.model_dump(mode="json")})
        return
    output.result(str(path))
    hosts = len(wanted.hosts)
    check = f"clusterkit check{option(cluster)}"
    output.note(f"{hosts} host{'s' if hosts > 1 else ''}, head node {wanted.head_host.name}.\nNext: {check}")
