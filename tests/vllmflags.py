"""Options of vLLM servers in tests on the CPU."""

FLAGS = (
    "--dtype",
    "float32",
    "--enforce-eager",
    # The model runs in the engine's process instead of one of its own: a third less to start. vLLM's way by default is
    # what tests/integration/test_vllm_engine.py's server does.
    "--distributed-executor-backend",
    "vllm.v1.executor.uniproc_executor.UniProcExecutor",
)
"""A model in float32 on a server that starts fast."""
