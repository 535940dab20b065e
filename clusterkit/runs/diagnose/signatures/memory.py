"""Memory of GPUs and hosts that ran out."""

from __future__ import annotations

from clusterkit.runs.diagnose.model import GENERATE, REFERENCE, START, TRAIN, WARMUP, WEIGHTS, Case, Rule, Signature
from trainer.config_parts import LESS_MEMORY

SMALLER_MICRO_BATCH = Rule(
    "halve",
    key="train.max_tokens_per_mb",
    areal="actor_train.mb_spec.max_tokens_per_mb",
    why="fewer tokens in one pass; it can be as low as the longest sequence",
)
SMALLER_REFERENCE_BATCH = Rule(
    "halve",
    key="train.max_tokens_per_mb",
    areal="ref_inf.mb_spec.max_tokens_per_mb",
    why="fewer tokens in one pass; it can be as low as the longest sequence",
)
RECOMPUTE = Rule(
    "next",
    key="model.gradient_checkpointing",
    steps=LESS_MEMORY,
    why="activations are recomputed (full), by pieces (chunked), and their inputs wait in host memory (offloaded)",
)
SMALLER_LOGITS = Rule(
    "halve", key="train.logprob_chunk", least=256, why="fewer rows of logits, each as wide as the vocabulary"
)
OFFLOAD = Rule("to", key="train.offload", to=True, why="parameters and optimizer wait in host memory: slower")
OTHER_LAYOUT = "for 7B and up: less data parallelism and more tensor or pipeline parallelism in allocation_mode"
LESS_ENGINE_MEMORY = Rule(
    "less",
    key="rollout.gpu_memory_fraction",
    areal="sglang.mem_fraction_static",
    engine="server",
    by=0.1,
    least=0.3,
    why="leaves room beside weights and KV cache",
)
MORE_ENGINE_MEMORY = Rule(
    "more",
    key="rollout.gpu_memory_fraction",
    areal="sglang.mem_fraction_static",
    engine="server",
    by=0.1,
    most=0.9,
    why="the share holds weights and KV cache together",
)
FEWER_REQUESTS = Rule(
    "halve",
    key="rollout.max_running",
    areal="sglang.max_running_requests",
    engine="server",
    least=8,
    why="fewer at a time",
)
SMALLER_FORWARD = Rule(
    "halve",
    key="rollout.max_batch_tokens",
    engine="embedded",
    least=1024,
    why="fewer prompt tokens in one forward pass of the engine",
)
DEFRAGMENT = Rule(
    "to",
    environment="PYTORCH_CUDA_ALLOC_CONF",
    to="expandable_segments:True",
    why="against memory that is reserved in pieces too small to use",
)
OTHER_PROCESSES = (
    "look for processes that were left on the GPUs: nvidia-smi",
    "several hosts: restart Ray (clusterkit down, then clusterkit setup); one host: end the left-over processes",
)

MEMORY = (
    Signature(
        "gpu-memory",
        "GPU memory ran out",
        (
            r"torch\.(cuda\.)?OutOfMemoryError",
            r"CudaOutOfMemoryError",
            r"CUDA out of memory\. Tried to allocate",
            r"a GPU ran out of memory \(",
        ),
        "The log does not say in which phase; most often it is the training pass.",
        OTHER_PROCESSES[:1],
        rules=(SMALLER_MICRO_BATCH, RECOMPUTE, SMALLER_LOGITS, LESS_ENGINE_MEMORY, DEFRAGMENT),
        in_phases=(
            Case(
                (START,),
                "Something else holds memory of the GPU, or the model and its optimizer do not fit.",
                (*OTHER_PROCESSES, OTHER_LAYOUT),
                rules=(LESS_ENGINE_MEMORY, OFFLOAD, DEFRAGMENT),
            ),
            Case(
                (GENERATE,),
                "The engine's share of the GPU leaves too little for its activations.",
                rules=(LESS_ENGINE_MEMORY, FEWER_REQUESTS, SMALLER_FORWARD),
            ),
            Case(
                (REFERENCE,),
                "The forward pass of the reference model holds too many tokens at a time.",
                (OTHER_LAYOUT,),
                rules=(SMALLER_REFERENCE_BATCH, SMALLER_LOGITS, DEFRAGMENT),
            ),
            Case(
                (TRAIN, WARMUP),
                "Activations and logits of a micro-batch do not fit beside weights and optimizer.",
                (OTHER_LAYOUT,),
                rules=(SMALLER_MICRO_BATCH, RECOMPUTE, SMALLER_LOGITS, OFFLOAD, DEFRAGMENT),
            ),
            Case(
                (WEIGHTS,),
                "The new weights need room on the GPU beside the engine's share.",
                rules=(LESS_ENGINE_MEMORY, DEFRAGMENT),
            ),
        ),
        origin="PyTorch",
    ),
    Signature(
        "cpu-kv-cache",
        "The host's memory is too small for the engine's KV cache on the CPU",
        (r"CUDA error: out of memory",),
        "vLLM reserves its CPU swap space as pinned host memory when it starts, and the host does not have it.",
        ("free memory of the host: free -g", "locked memory must not be limited: ulimit -l says unlimited"),
        rules=(Rule("halve", areal="actor.vllm.swap_space", least=1, why="GiB of host memory per GPU"),),
        origin="vLLM (seed 004)",
        unless=("gpu-memory",),
    ),
    Signature(
        "swap-space",
        "The engine's CPU swap space ran out",
        (r"Aborted due to the lack of CPU swap space",),
        "Long sequences need more KV cache than the GPU has, and the swap space on the CPU is full too.",
        rules=(
            Rule("double", areal="actor.vllm.swap_space", most=256, why="GiB of host memory per GPU"),
            Rule("halve", areal="actor.vllm.max_num_seqs", least=8, why="fewer sequences at a time"),
        ),
        origin="vLLM (seed 004)",
    ),
    Signature(
        "illegal-access",
        "Illegal memory access on a GPU",
        (r"an illegal memory access was encountered", r"CUDA_ERROR_ILLEGAL_ADDRESS"),
        "In generation this is most often another face of too little GPU memory, or a fault of an attention kernel.",
        ("smaller batches lower the sample efficiency and lengthen the training",),
        rules=(
            Rule(
                "to",
                engine="server",
                areal="sglang.attention_backend",
                to="triton",
                why="for vLLM: VLLM_ATTENTION_BACKEND=XFORMERS",
            ),
            Rule("halve", key="rollout.batch_size", areal="dataset.train_bs_n_seqs", why="fewer tasks a step"),
            Rule("halve", key="rollout.group_size", areal="group_size", least=2, why="fewer answers a task"),
            LESS_ENGINE_MEMORY,
        ),
        origin="CUDA (seed 004)",
    ),
    Signature(
        "engine-memory-small",
        "The engine's share of GPU memory is too small for the model",
        (
            r"Not enough memory\. Please try to increase --mem-fraction-static",
            r"No available memory for the cache blocks",
            r"larger than the (maximum number of tokens that can be stored in KV cache|available KV cache memory)",
        ),
        "After the weights nothing is left of the share for the KV cache: more memory for the engine helps.",
        OTHER_PROCESSES[:1],
        rules=(MORE_ENGINE_MEMORY, Rule("double", areal="sglang.tp_size", most=8, why="weights split over more GPUs")),
        origin="SGLang, vLLM",
    ),
    Signature(
        "kv-cache-full",
        "The engine's KV cache is full",
        (r"[Oo]ut of memory\. Try to lower your batch size", r"alloc_req_slots runs out of memory"),
        "Requests that run at the same time need more tokens than the KV cache holds.",
        rules=(FEWER_REQUESTS, MORE_ENGINE_MEMORY),
        origin="SGLang",
    ),
    Signature(
        "cuda-graph",
        "CUDA graphs could not be captured",
        (r"Capture (\w+ )*cuda graph failed",),
        "Capturing needs memory beside the engine's share; or a kernel cannot be captured.",
        rules=(
            LESS_ENGINE_MEMORY,
            Rule("to", areal="sglang.disable_cuda_graph", to=True, why="slower decoding, but it starts"),
        ),
        origin="SGLang",
        follows=True,
    ),
    Signature(
        "host-memory",
        "The host's memory ran out",
        (
            r"was killed due to the node running low on memory",
            r"killed due to memory pressure \(OOM\)",
            r"DefaultCPUAllocator: (can't allocate memory|not enough memory)",
            r"\bMemoryError\b",
            r"Cannot allocate memory",
            r"oom-kill|Out of memory: Killed process",
        ),
        "Weights, optimizer, trajectories or data of all processes of a host need more than it has.",
        (
            "what the kernel ended: dmesg -T | grep -i 'killed process'",
            "a need that grows from step to step is a leak: restarting from the recover checkpoint frees it",
        ),
        rules=(
            SMALLER_FORWARD,
            SMALLER_MICRO_BATCH,
            Rule("halve", key="train.ranks", least=1, why="every rank of a host keeps a replica for sampling"),
        ),
        origin="Ray, PyTorch, Linux",
    ),
    Signature(
        "killed",
        "A process was killed (SIGKILL)",
        (r"ended by signal 9\b", r"[Ee]xit(ed with)? ?code:? (-9|137)\b", r"exitcode: -9\b", r"ended by SIGKILL\b"),
        "SIGKILL cannot be caught, so the process could not say why: the kernel sends it where the host's "
        "memory ran out, people do with kill -9, and so do Slurm, Docker and systemd at a limit.",
        (
            "whether it was the kernel: dmesg -T | grep -i 'killed process'; give what it says to "
            "clusterkit diagnose --log",
            "where nobody meant it and no memory ran out: the same command goes on from the last recover checkpoint",
        ),
        origin="clusterkit, SGLang, torchrun",
        unless=("host-memory",),
    ),
    Signature(
        "shared-memory",
        "Shared memory (/dev/shm) is too small",
        (
            r"Error while creating shared memory segment",
            r"out of shared memory",
            r"\bBus error\b",
            r"unable to (open|mmap|allocate) shared memory",
            r"/dev/shm.*(No space left|has only)",
        ),
        "Containers have 64 MB of /dev/shm unless told otherwise; NCCL and Ray's object store need gigabytes.",
        ("set up again with more of it: clusterkit setup --shm 64g", "what there is: df -h /dev/shm"),
        origin="NCCL, PyTorch, Ray",
    ),
)
