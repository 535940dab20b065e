"""Every TCP port that Ray listens on, pinned, so that firewalls can open them and `check` can try them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Ports:
    """Ports of a Ray node, those of the head first. All are below Linux's range for outgoing connections (32768).

    Ray's defaults for the agent (52365) and the head's two metrics ports (44217, 44227) are inside that range, where an
    outgoing connection of a busy host may have taken them.
    """

    gcs: int = 6379
    dashboard: int = 8265  # on 127.0.0.1 only
    client: int = 10001
    autoscaler_metrics: int = 6386
    dashboard_metrics: int = 6387
    node_manager: int = 6380
    object_manager: int = 6381
    runtime_env_agent: int = 6382
    agent_grpc: int = 6383
    agent_http: int = 6384
    metrics_export: int = 6385
    first_worker: int = 10002
    last_worker: int = 19999

    def on_head(self) -> dict[str, int]:
        """Return name and number of the ports that only the head listens on."""
        return {
            "GCS": self.gcs,
            "dashboard": self.dashboard,
            "client server": self.client,
            "autoscaler metrics": self.autoscaler_metrics,
            "dashboard metrics": self.dashboard_metrics,
        }

    def on_every_node(self) -> dict[str, int]:
        """Return name and number of the ports that every node listens on, without those of worker processes."""
        return {
            "node manager": self.node_manager,
            "object manager": self.object_manager,
            "runtime environment agent": self.runtime_env_agent,
            "agent (gRPC)": self.agent_grpc,
            "agent (HTTP)": self.agent_http,
            "metrics": self.metrics_export,
        }

    def listening(self, head: bool) -> dict[str, int]:
        """Return name and number of all ports of the head or a worker, without those of worker processes."""
        return {**(self.on_head() if head else {}), **self.on_every_node()}

    def options(self, head: bool) -> list[str]:
        """Return the arguments of `ray start` that pin the ports."""
        options = {"port": self.gcs, "dashboard-port": self.dashboard, "ray-client-server-port": self.client}
        options = (options if head else {}) | {
            "node-manager-port": self.node_manager,
            "object-manager-port": self.object_manager,
            "runtime-env-agent-port": self.runtime_env_agent,
            "dashboard-agent-grpc-port": self.agent_grpc,
            "dashboard-agent-listen-port": self.agent_http,
            "metrics-export-port": self.metrics_export,
            "min-worker-port": self.first_worker,
            "max-worker-port": self.last_worker,
        }
        return [f"--{name}={port}" for name, port in options.items()]

    def environment(self, head: bool) -> dict[str, str]:
        """Return the variables for the ports that `ray start` has no argument for."""
        ports = {"AUTOSCALER_METRIC_PORT": self.autoscaler_metrics, "DASHBOARD_METRIC_PORT": self.dashboard_metrics}
        return {name: str(port) for name, port in ports.items()} if head else {}
