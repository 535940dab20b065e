"""`clusterkit init`: write an inventory."""

from __future__ import annotations

from clusterkit.hosts import inventory
from clusterkit.provision.ray.current import option
from clusterkit.ssh.host_options import HostOptions
from clusterkit.ssh.selection import cluster_of
from clusterkit.ui import output
from trainer.errors import UserError


def init(hosts: HostOptions, cluster: str, *, force: bool, as_json: bool) -> None:
    """Keep the hosts under the cluster's name."""
    path = inventory.path_of(cluster)
    typed = cluster_of(hosts)
    kept = inventory.load(cluster) if path.exists() else None
    if kept is not None and kept != typed and not force:
        host_names = ", ".join(host.name for host in kept.hosts)
        raise UserError(
            f"the cluster '{cluster}' is kept with other settings (hosts {host_names}) in {path}.\n"
            "Add --force to replace it, or keep the new one under another name: --cluster NAME"
        )
    if kept != typed:
        inventory.save(typed)
    if as_json:
        output.result_json({"path": str(path), "changed": kept != typed, "cluster": typed.model_dump(mode="json")})
        return
    output.result(str(path))
    count = len(typed.hosts)
    check = f"clusterkit check{option(cluster)}"
    output.note(f"{count} host{'s' if count > 1 else ''}, head node {typed.head_host.name}.\nNext: {check}")
