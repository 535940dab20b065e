"""Starting an SGLang server and finding out what it can do.

The fields and routes used here were read in, and run against, the versions in `TRIED_VERSIONS`.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from trainer.engines.http import EngineError, Json, Server, ServerPool
from trainer.engines.process import ServerCommand, ServerProcess, ServerStartError, free_port
from trainer.errors import UserError

log = logging.getLogger(__name__)

TRIED_VERSIONS = ("0.5.17",)
HEALTH_PATH = "/health"
GENERATE_PATH = "/generate"
PORT_TRIES = 3


@dataclass(frozen=True, slots=True)
class SGLangServerOptions:
    """What one server runs with.

    model: Hugging Face folder. log: file for its output. name: in messages and for placing keys. gpus: device numbers,
    all of them for one replica (tensor parallel). version: of the weights in `model`. memory_fraction: of the GPU, for
    weights and KV cache. context_length: of prompt and response together (0: the model's own). fp32_head: logits are
    computed in float32; in bfloat16 they are rounded by up to 0.06, and the log-probs with them. deterministic:
    responses follow their seed alone, whatever else is in the batch (slower). flags: more options of SGLang's own. env:
    added to the environment. start_seconds: until it must answer. python: the interpreter that has SGLang.
    """

    model: Path
    log: Path
    name: str = "sglang-0"
    gpus: tuple[int, ...] = (0,)
    host: str = "127.0.0.1"
    version: int = 0
    memory_fraction: float = 0.85
    context_length: int = 0
    fp32_head: bool = True
    deterministic: bool = False
    flags: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    start_seconds: float = 900.0
    python: str = sys.executable

    def argv(self, port: int) -> tuple[str, ...]:
        """The command line."""
        # Training samples from the whole vocabulary without a grammar: SGLang's plain backends for both are enough.
        arguments = ["-m", "sglang.launch_server", "--model-path", str(self.model)]
        arguments += ["--host", self.host, "--port", str(port), "--tp-size", str(len(self.gpus))]
        arguments += ["--mem-fraction-static", str(self.memory_fraction), "--weight-version", str(self.version)]
        arguments += ["--skip-tokenizer-init", "--sampling-backend", "pytorch", "--grammar-backend", "none"]
        if self.fp32_head:
            arguments += ["--enable-fp32-lm-head"]
        if self.context_length:
            arguments += ["--context-length", str(self.context_length)]
        if self.deterministic:
            arguments += ["--enable-deterministic-inference"]
        return (self.python, *arguments, *self.flags)

    def environment(self) -> dict[str, str]:
        """What the server's environment has beside this process's."""
        # Weights that arrive over NCCL need both ends without CUMEM and NVLS; SGLang sets the same for itself.
        nccl = {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
        return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, self.gpus)), **nccl, **self.env}


async def launch(options: SGLangServerOptions) -> tuple[Server, ServerProcess]:
    """Start a server and wait until it answers; from then on its death makes it unusable at once.

    Raises:
        UserError: the model folder, the number of GPUs or the Python cannot be right.
        ServerStartError: it did not start; the message holds the cause.

    """
    check_options(options)
    for tries_left in reversed(range(PORT_TRIES)):
        port = free_port(options.host)
        command = ServerCommand(options.name, options.argv(port), options.log, options.environment())
        process = ServerProcess(command).start()
        url = f"http://{options.host}:{port}"
        try:
            await process.wait_ready(url + HEALTH_PATH, options.start_seconds)
        except ServerStartError as error:
            if tries_left and "ddress already in use" in str(error):
                continue
            raise
        except BaseException:  # cancelled: nobody else would end it
            await process.stop()
            raise
        server = Server(options.name, url, options.version)
        tie(server, process)
        return server, process
    raise AssertionError("unreachable")


def tie(server: Server, process: ServerProcess) -> None:
    """Send no more requests to a server whose process has ended, and remember how it ended."""
    process.on_end(lambda: server.died(f"it {process.how_it_ended()}"))


def check_options(options: SGLangServerOptions) -> None:
    """Find what can be found wrong without starting a server. Raises UserError."""
    if options.python == sys.executable and importlib.util.find_spec("sglang") is None:
        tried = ", ".join(TRIED_VERSIONS)
        raise UserError(
            f"SGLang is not installed in {sys.executable}: install sglang (tried: {tried}) beside the trainer"
        )
    try:
        config = json.loads((options.model / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(
            f"{options.model} is no model folder (config.json: {error}): give the folder of a model"
        ) from error
    if not any(options.model.glob("*.safetensors")):
        raise UserError(f"{options.model} holds no .safetensors weights: give the folder of a model with its weights")
    heads, size = int(config.get("num_attention_heads") or 0), len(options.gpus)
    if size < 1 or len(set(options.gpus)) != size:
        raise UserError(f"{options.name} needs one GPU or more, each named once; it was given {list(options.gpus)}")
    if heads % size:
        raise UserError(
            f"{size} GPUs a server do not divide the model's {heads} attention heads: use a number that does"
        )


async def probe(pool: ServerPool, server: Server) -> str:
    """Ask a server for its version and try the fields that sampling needs; returns the version.

    Raises:
        EngineError: it holds other weights than expected, or does not return what training needs.

    """
    control = pool.limits.control
    version = str((await pool.call(server, "GET", "/server_info", None, control)).get("version", "unknown"))
    if version not in TRIED_VERSIONS:
        log.warning(
            "%s runs SGLang %s; this code was tried with %s only. What it needs is checked now, the rest is unknown",
            server.name, version, ", ".join(TRIED_VERSIONS),
        )  # fmt: skip
    await check_version(pool, server, server.version)
    sampling = {"max_new_tokens": 1, "temperature": 1.0}
    body: Json = {"input_ids": [1], "sampling_params": sampling, "return_logprob": True, "extra_key": "probe"}
    meta = (await pool.call(server, "POST", GENERATE_PATH, body, control)).get("meta_info") or {}
    for name in ("output_token_logprobs", "finish_reason", "weight_version"):
        if not meta.get(name):
            raise EngineError(
                f"{server.name} (SGLang {version}) does not return meta_info.{name}, which training needs: "
                f"install SGLang {TRIED_VERSIONS[-1]}"
            )
    return version


async def check_version(pool: ServerPool, server: Server, version: int) -> None:
    """Raise EngineError unless the server says that its weights are `version`."""
    info = await pool.call(server, "GET", "/model_info", None, pool.limits.control)
    if (reported := info.get("weight_version")) != str(version):
        raise EngineError(f"{server.name} reports weight version {reported}, expected {version}")
