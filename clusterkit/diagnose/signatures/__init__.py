"""What messages in logs mean, as data; docs/diagnose.md has them as a table."""

from __future__ import annotations

from clusterkit.diagnose.model import Signature
from clusterkit.diagnose.signatures.cluster import CLUSTER
from clusterkit.diagnose.signatures.machine import MACHINE
from clusterkit.diagnose.signatures.memory import MEMORY
from clusterkit.diagnose.signatures.network import NETWORK

SIGNATURES: tuple[Signature, ...] = (*MEMORY, *NETWORK, *CLUSTER, *MACHINE)
