"""Processes that cannot reach one another, or wait for one another for ever."""

from __future__ import annotations

from clusterkit.runs.diagnose.model import WEIGHTS, Case, Rule, Signature

DEBUG = Rule("to", environment="NCCL_DEBUG", to="INFO", why="NCCL then says on which link")
INTERFACE = Rule(
    "to",
    environment="NCCL_SOCKET_IFNAME",
    to="the interface that the hosts share, such as eth0, on every host",
    why="else NCCL may choose one that is up but leads nowhere (docker0)",
)
GLOO_INTERFACE = Rule(
    "to", environment="GLOO_SOCKET_IFNAME", to="the interface that the hosts share", why="gloo asks the host's name"
)
LINKS = "test the links between the hosts: clusterkit check --nccl"

NETWORK = (
    Signature(
        "nccl-invalid-argument",
        "NCCL: Cuda failure 'invalid argument'",
        (r"Cuda failure (\d+ )?'invalid argument'",),
        "The two sides of the weight update allocate differently: SGLang turns NCCL's cuMem and NVLS off for "
        "itself, the trainer's side has them on. The engine's weights are half updated.",
        ("start the engine servers again: their weights are of two versions",),
        rules=(
            Rule("to", environment="NCCL_CUMEM_ENABLE", to="0", why="on both sides"),
            Rule("to", environment="NCCL_NVLS_ENABLE", to="0", why="on both sides"),
        ),
        origin="NCCL",
        together=True,
    ),
    Signature(
        "nccl-timeout",
        "A collective timed out",
        (
            r"Watchdog caught collective operation timeout",
            r"Timeout at NCCL work",
            r"watchdog got stuck for \d+ seconds",
            r"Some NCCL operations have failed or timed out",
        ),
        "One rank did not come to a collective that the others wait in: it died or hangs (look for its own "
        "error before this one), or the link between two hosts is broken.",
        (LINKS, "a rank that is busy for longer than the time-out needs a longer one, not a restart"),
        rules=(DEBUG, INTERFACE),
        in_phases=(
            Case(
                (WEIGHTS,),
                "The trainer waits for an engine that did not join the weight update.",
                ("look at the engines' logs for what happened to them first", LINKS),
                rules=(DEBUG, INTERFACE),
            ),
        ),
        origin="PyTorch",
        follows=True,
    ),
    Signature(
        "nccl-interface",
        "NCCL found no network interface",
        (r"Bootstrap : no socket interface found", r"No usable listening interface found"),
        "NCCL_SOCKET_IFNAME names an interface that this host does not have, or there is none but loopback.",
        ("what there is: ip -brief address",),
        rules=(INTERFACE,),
        origin="NCCL",
    ),
    Signature(
        "nccl-connect",
        "NCCL cannot reach another host",
        (
            r"NCCL WARN .*(connect to .* (failed|returned)|Connection refused|No route to host)",
            r"ncclRemoteError|remote process exited or there was a network error",
            r"NCCL WARN .*(ibv_|IBV_|Got completion from peer .* with (error|status))",
        ),
        "The other process is gone, a firewall stands between the hosts, or InfiniBand/RoCE is not usable.",
        (LINKS,),
        rules=(INTERFACE, DEBUG, Rule("to", environment="NCCL_IB_DISABLE", to="1", why="to tell whether RDMA is it")),
        origin="NCCL",
        follows=True,
    ),
    Signature(
        "nccl-error",
        "An NCCL call failed",
        (r"NCCL error in:", r"ncclUnhandledCudaError|ncclSystemError|ncclInternalError"),
        "NCCL does not say why until asked.",
        (LINKS,),
        rules=(DEBUG,),
        origin="PyTorch, NCCL",
        follows=True,
        unless=("nccl-invalid-argument", "nccl-interface", "nccl-connect", "shared-memory", "nccl-timeout"),
    ),
    Signature(
        "gloo-connect",
        "gloo cannot reach another process",
        (
            r"[Gg]loo.*(connectFullMesh failed|Connection refused|timed out connecting)",
            r"[Gg]loo.*[Uu]nable to (find address for|resolve hostname)",
            r"[Gg]loo.*(Connection closed by peer|Connection reset by peer|Timed out waiting \d+ms)",
        ),
        "Another rank is gone (look for its own error), or the host's name leads to an address that others "
        "cannot reach.",
        ("the host's name must not be 127.0.1.1 in /etc/hosts",),
        rules=(GLOO_INTERFACE,),
        origin="PyTorch",
        follows=True,
    ),
    Signature(
        "rendezvous",
        "Ranks did not find one another",
        (
            r"DistStoreError|Timed out after \d+ seconds waiting for clients",
            r"client socket has timed out after \d+ ?ms while trying to connect",
            r"ranks these did not come within|could not reach rank 0 at",
        ),
        "Fewer ranks came than were expected, or the first rank's port cannot be reached from the others.",
        ("clusterkit check shows which ports are closed between hosts", "clusterkit ray-status: are all there?"),
        rules=(GLOO_INTERFACE,),
        origin="PyTorch",
        follows=True,
    ),
    Signature(
        "port-taken",
        "A port is taken",
        (r"Address already in use|EADDRINUSE|address already in use",),
        "A process of an earlier run still listens, or two runs share a host.",
        ("who listens: ss -ltnp", "a cluster's own left-overs: clusterkit down, then clusterkit setup"),
        origin="operating system",
    ),
)
