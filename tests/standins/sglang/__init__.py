"""A stand-in for SGLang: `python -m sglang.launch_server` is the server of tests/weightserver.py."""
