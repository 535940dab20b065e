"""GPUs, drivers, disks and files of a host."""

from __future__ import annotations

from clusterkit.runs.diagnose.model import Rule, Signature

NO_TRAJECTORIES = Rule("to", key="rollout.save_trajectories", to=False, why="trajectories are then not written")

MACHINE = (
    Signature(
        "nvml-unknown",
        "The container lost its GPUs (NVML: Unknown Error)",
        (r"Failed to initialize NVML: Unknown Error",),
        "systemd was reloaded on the host (an upgrade does that), and took the container's right to the GPUs away.",
        (
            "start the containers again: clusterkit down, then clusterkit setup",
            "GPUs that a container has by CDI (--device nvidia.com/gpu=all) are not lost so",
        ),
        origin="NVIDIA container toolkit",
    ),
    Signature(
        "crashed",
        "A process crashed in native code",
        (
            r"ended by signal (4|6|7|8|11)\b",
            r"ended by SIG(ILL|ABRT|BUS|FPE|SEGV)\b",
            r"Segmentation fault|Fatal Python error: ",
        ),
        "A library, a GPU kernel or the driver did something that no Python code can do or catch.",
        (
            "what its threads did is in main.log, or in the process's own log, below `Fatal Python error`",
            "the same command goes on from the last recover checkpoint; where it comes back on one host only, "
            "leave that host out",
        ),
        origin="operating system, clusterkit",
        unless=("shared-memory", "gpu-broken"),
    ),
    Signature(
        "driver-mismatch",
        "The driver was upgraded and not loaded",
        (r"Driver/library version mismatch",),
        "The kernel still runs the old driver.",
        ("reboot the host, then clusterkit setup",),
        origin="NVIDIA driver",
    ),
    Signature(
        "driver-old",
        "The driver is too old for this CUDA",
        (r"CUDA driver version is insufficient", r"NVIDIA driver on your system is too old"),
        "The image's CUDA needs a newer driver.",
        ("clusterkit check names the oldest that will do",),
        origin="CUDA, PyTorch",
    ),
    Signature(
        "no-gpu",
        "No GPU is visible",
        (r"No CUDA GPUs are available", r"no CUDA-capable device is detected", r"couldn't communicate with the NVIDIA"),
        "The container was started without GPUs, CUDA_VISIBLE_DEVICES is empty, or the driver is not loaded.",
        ("clusterkit check shows the GPUs of every host",),
        origin="CUDA, PyTorch, nvidia-smi",
        unless=("nvml-unknown", "driver-mismatch"),
    ),
    Signature(
        "gpu-broken",
        "A GPU failed",
        (
            r"NVRM: Xid \(.*\): (48|63|64|74|79|92|94|95|119|120|140)\b",
            r"uncorrectable ECC error",
            r"GPU has fallen off the bus",
            r"CUDA error: unspecified launch failure",
        ),
        "Hardware: memory errors or a lost link. It comes back on the same host.",
        (
            "leave the host out and go on with the others; then drain and reset or reboot it",
            "nvidia-smi -q -d ECC,PAGE_RETIREMENT; dmesg -T | grep Xid",
        ),
        origin="NVIDIA driver, CUDA",
    ),
    Signature(
        "disk-full",
        "A disk is full",
        (r"No space left on device", r"no space left\b", r"Disk quota exceeded", r"Errno (28|122)\b"),
        "Checkpoints, trajectories or the object store have filled it. Earlier recover checkpoints stay whole.",
        (
            "what takes the room: du -xsh under the fileroot; old persistent checkpoints can go",
            "then the same command goes on",
        ),
        rules=(NO_TRAJECTORIES,),
        origin="operating system, clusterkit",
        unless=("shared-memory",),
    ),
    Signature(
        "read-only",
        "A file system cannot be written",
        (r"Read-only file system", r"Stale (NFS )?file handle", r"Transport endpoint is not connected"),
        "The shared storage was mounted anew, lost its server, or the disk went read-only after an error.",
        ("on the host: mount | grep storage, dmesg -T; clusterkit check looks at the storage of all hosts",),
        origin="operating system",
    ),
    Signature(
        "too-many-files",
        "Too many open files",
        (r"Too many open files",),
        "The limit of open files is too low for this many connections.",
        ("ulimit -n 65536 before the start, or LimitNOFILE= of the service",),
        origin="operating system",
    ),
    Signature(
        "weights-incomplete",
        "The model's files are not complete",
        (
            r"HeaderTooLarge|MetadataIncompleteBuffer|InvalidHeaderDeserialization",
            r"Error while deserializing header",
            r"version https://git-lfs\.github\.com/spec",
        ),
        "A download was cut short, or only the pointers of Git LFS were fetched.",
        ("fetch it again: clusterkit assets; in a clone: git lfs pull",),
        origin="safetensors, Git LFS",
    ),
    Signature(
        "module-missing",
        "A Python package is missing",
        (r"ModuleNotFoundError: No module named",),
        "The image or environment lacks a package that the run needs.",
        ("locally: pip install 'clusterkit[train]'; on a cluster: clusterkit setup takes the right image",),
        origin="Python",
    ),
)
