"""Every TCP port that Ray listens on, pinned: what a firewall has to let through and a check looks for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Ports:
    """Ports of a Ray node. Those of the head come first; all lie below Linux's range for outgoing connections (32768).

    Ray's own choice for the agent (52365) and the two metrics ports of the head (44217, 44227) lie inside that range,
    where a busy host may have given them to an outgoing connection.
    """

    gcs: int = 6379
    dashboard: int = 8265
    """On 127.0.0.1 only."""
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
        """Name and number of what only the head listens on."""
        return {
            "GCS": self.gcs,
            "dashboard": self.dashboard,
            "client server": self.client,
            "autoscaler metrics": self.autoscaler_metrics,
            "dashboard metrics": self.dashboard_metrics,
        }

    def on_every_node(self) -> dict[str, int]:
        """Name and number of what every node listens on, beside the range of the workers' processes."""
        return {
            "node manager": self.node_manager,
            "object manager": self.object_manager,
            "runtime environment agent": self.runtime_env_agent,
            "agent (gRPC)": self.agent_grpc,
            "agent (HTTP)": self.agent_http,
            "metrics": self.metrics_export,
        }

    def listening(self, head: bool) -> dict[str, int]:
        """Name and number of everything that the head or a worker listens on, beside the range of worker processes."""
        return {**(self.on_head() if head else {}), **self.on_every_node()}

    def options(self, head: bool) -> list[str]:
        """Arguments of `ray start` that pin them."""
        arguments = [f"--port={self.gcs}", f"--dashboard-port={self.dashboard}"] if head else []
        arguments += [f"--ray-client-server-port={self.client}"] if head else []
        return [
            *arguments,
            f"--node-manager-port={self.node_manager}",
            f"--object-manager-port={self.object_manager}",
            f"--runtime-env-agent-port={self.runtime_env_agent}",
            f"--dashboard-agent-grpc-port={self.agent_grpc}",
            f"--dashboard-agent-listen-port={self.agent_http}",
            f"--metrics-export-port={self.metrics_export}",
            f"--min-worker-port={self.first_worker}",
            f"--max-worker-port={self.last_worker}",
        ]

    def environment(self, head: bool) -> dict[str, str]:
        """Variables for the ports that `ray start` has no argument for."""
        if not head:
            return {}
        return {
            "AUTOSCALER_METRIC_PORT": str(self.autoscaler_metrics),
            "DASHBOARD_METRIC_PORT": str(self.dashboard_metrics),
        }
