"""What messages in logs mean, as data; docs/diagnose.md has them as a table."""

from __future__ import annotations

from clusterkit.runs.diagnose.model import Signature
from clusterkit.runs.diagnose.signatures.cluster import CLUSTER
from clusterkit.runs.diagnose.signatures.machine import MACHINE
from clusterkit.runs.diagnose.signatures.memory import MEMORY
from clusterkit.runs.diagnose.signatures.network import NETWORK

SIGNATURES: tuple[Signature, ...] = (*MEMORY, *NETWORK, *CLUSTER, *MACHINE)
