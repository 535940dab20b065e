"""Ray, engine servers and recover checkpoints."""

from __future__ import annotations

from clusterkit.runs.diagnose.model import Rule, Signature

CLUSTER = (
    Signature(
        "placement-pending",
        "Ray has no room for the run's placement group",
        (
            r"\d+\+? pending placement groups",
            r"[Pp]lacement group creation timed out",
            r"Placement group timeout\.",
            r"Waiting for creating a placement group of specs for",
            r"resource request cannot be scheduled right now",
            r"No available node types can fulfill resource request",
        ),
        "The run wants more GPUs (or more on one host) than Ray has free: hosts are missing, another job holds "
        "them, or the allocation adds up to more than there is.",
        (
            "n_nodes, n_gpus_per_node and the sum of allocation_mode must be what the cluster has free",
            "what Ray has: clusterkit ray-status",
            "hosts that are missing: clusterkit setup brings them back",
            "jobs that hold GPUs: clusterkit jobs",
        ),
        origin="Ray",
    ),
    Signature(
        "ray-node-dead",
        "A host left the Ray cluster",
        (
            r"has been marked dead",
            r"actor died because its node has died",
            r"node was terminated (un)?expectedly",
            r"raylet.*(died|terminated unexpectedly)|Raylet is terminated",
        ),
        "The host went down, was cut off, or its memory was so full that Ray lost touch with it.",
        ("look at the hosts: clusterkit check; bring it back: clusterkit setup; then go on with the run",),
        origin="Ray",
    ),
    Signature(
        "ray-version",
        "Hosts run different versions of Ray or Python",
        (r"Version mismatch: The cluster was started with",),
        "A host has another image than the head.",
        ("take the same image everywhere: clusterkit setup; clusterkit ray-status shows the versions",),
        origin="Ray",
    ),
    Signature(
        "ray-head",
        "Ray's head cannot be reached",
        (r"[Ff]ailed to connect to GCS", r"Could not find any running Ray instance"),
        "The head's container is down or was rebooted, or port 6379 is closed.",
        ("clusterkit ray-status; clusterkit setup starts it again",),
        origin="Ray",
    ),
    Signature(
        "actor-died",
        "A worker process died",
        (
            r"The actor died unexpectedly before finishing this task",
            r"Worker unexpectedly exits with a connection error code 2",
            r"ActorDiedError|WorkerCrashedError",
        ),
        "Ray only sees that the process is gone. Its own log has the reason; without one, the kernel ended it "
        "for want of memory.",
        ("what the kernel ended: dmesg -T | grep -i 'killed process', on the worker's host",),
        origin="Ray",
        follows=True,
    ),
    Signature(
        "server-launch",
        "An engine server did not start",
        (
            r"[Ss]erver launch failed",
            r"Received sigquit from a child process",
            r"Engine core initialization failed",
            r"Initialization failed\. Please see the error messages above",
            r"Scheduler hit an exception",
            r"was not ready after [\d.]+ s \(",
        ),
        "The reason is in the server's own log, above this line: memory, a missing file, a port.",
        ("read the server's log, and give it to: clusterkit diagnose --log FILE",),
        origin="AReaL, SGLang, vLLM",
        follows=True,
    ),
    Signature(
        "context-length",
        "A request is longer than the engine's context",
        (
            r"exceeds the (maximum allowed length|model's context length|context window)",
            r"longer than the model's context length",
            r"maximum context length is \d+ tokens",
        ),
        "Problem, memory, section and answer together do not fit into the engine's context window.",
        rules=(
            Rule("double", areal="sglang.context_length", most=131072, why="it costs KV cache"),
            Rule("halve", key="agent.chunk_tokens", why="shorter sections", least=64),
        ),
        origin="SGLang, vLLM",
    ),
    Signature(
        "recover-differs",
        "The recover checkpoint is of other settings",
        (
            r"is \w+ and was started with other settings",
            r"is whole but does not fit this model",
            r"was written with other settings",
        ),
        "Settings that shape what is learned were changed since the checkpoint was written.",
        ("go on: the old values; begin anew with the new ones: trial_name=NEW",),
        origin="clusterkit",
    ),
    Signature(
        "recover-invalid",
        "The recover checkpoint could not be used, and the run began anew",
        (r"Invalid recover checkpoint when", r"Guessed checkpoint path .*does not exist"),
        "The last save was cut short (crash or full disk while writing), or experiment, trial, batch size, "
        "group size or the number of hosts differ from the run's.",
        ("stop it if the lost steps matter: a persistent checkpoint can be the new start (actor.path)",),
        rules=(Rule("to", areal="recover_mode", to="resume", why="refuses instead of starting from nothing"),),
        origin="AReaL",
    ),
    Signature(
        "recover-damaged",
        "The recover checkpoint is damaged",
        (r"there is no whole recover checkpoint",),
        "Both slots lack files or hold other bytes than were written: a disk error, or someone changed them.",
        (
            "a persistent checkpoint can be the new start: model.path=CHECKPOINT trial_name=NEW",
            "with nothing to lose: recover_mode=disabled",
        ),
        origin="clusterkit",
    ),
)
