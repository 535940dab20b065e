"""SGLang's dialect: command line, routes and fields.

They were read in, and run against, the versions in `TRIED_VERSIONS`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainer.connections import LONG_IDLE_S
from trainer.engines.adapters import LOAD_DEADLINE, AdapterRoutes
from trainer.engines.dialect import Dialect, Stretch, UntouchedError, unreadable
from trainer.engines.http import Json, RefusedError, Server, ServerPool
from trainer.engines.options import MEMORY_SAVER, ServerOptions, Setting, visible_devices
from trainer.engines.sglang_setting import TRIED_VERSIONS, setting
from trainer.types import SamplingParams

# Answer when nothing was found to load and so nothing has changed.
UNTOUCHED = "Failed to get weights iterator"


class SGLangDialect(Dialect):
    """Dialect of SGLang's native routes."""

    title = "SGLang"
    generate_path = "/generate"
    health_path = "/health"
    weights_path = "/model_info"
    adapter_routes = AdapterRoutes("/load_lora_adapter", "/unload_lora_adapter")
    idle_variable = "SGLANG_TIMEOUT_KEEP_ALIVE"
    module = "sglang"
    tried_versions = TRIED_VERSIONS
    grace = 0.5  # it looks for SIGTERM every 5 s, and then kills its processes, too, once nothing is asked of it
    # Its lpm policy holds such prompts back where it knows not even their first 32 tokens, and instructions it knows.
    shares_batches = False
    extra = (
        f"`make gpu` installs it; by hand: sglang (tried: {', '.join(TRIED_VERSIONS)}) and clusterkit[gpu] in one "
        "environment"
    )

    def argv(self, options: ServerOptions, port: int) -> tuple[str, ...]:
        """See Dialect."""
        # Training samples from the whole vocabulary without a grammar: SGLang's plain backends for both are enough.
        arguments = ["-m", "sglang.launch_server", "--model-path", str(options.model)]
        arguments += ["--host", options.host, "--port", str(port), "--tp-size", str(len(options.gpus))]
        arguments += ["--mem-fraction-static", str(options.memory_fraction), "--weight-version", str(options.version)]
        arguments += ["--sampling-backend", "pytorch", "--log-level-http", "warning"]  # no line for every request
        if not options.chats:
            arguments += ["--skip-tokenizer-init", "--grammar-backend", "none"]
        if options.fp32_head:
            arguments += ["--enable-fp32-lm-head"]
        if options.context_length:
            arguments += ["--context-length", str(options.context_length)]
        if options.max_running:
            arguments += ["--max-running-requests", str(options.max_running)]
        if options.deterministic:
            arguments += ["--enable-deterministic-inference"]
        if options.lora_rank:
            arguments += ["--enable-lora", "--max-loras-per-batch", str(options.lora_versions)]
            arguments += ["--max-lora-rank", str(options.lora_rank), "--lora-target-modules", *options.lora_targets]
        return tuple(arguments)

    def adapted(self, options: ServerOptions) -> Setting:
        """See Dialect."""
        return setting(options)

    def environment(self, options: ServerOptions) -> dict[str, str]:
        """See Dialect."""
        # Weights that arrive over NCCL need both ends without CUMEM and NVLS; SGLang sets the same for itself.
        found = {"CUDA_VISIBLE_DEVICES": visible_devices(options.gpus), self.idle_variable: str(LONG_IDLE_S)}
        found |= {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
        if MEMORY_SAVER in options.flags:
            # /health generates a token: somebody's monitor would have it read memory that the trainer has just then.
            found["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] = "false"
        return found

    def request(self, ids: list[int], params: SamplingParams, left: int, stop_ids: list[int], server: Server) -> Json:
        """See Dialect."""
        sampling: Json = {
            "temperature": params.temperature,
            "max_new_tokens": left,
            "stop_token_ids": stop_ids,
            "top_p": params.top_p,
            "top_k": params.top_k,
            "sampling_seed": params.seed & (2**63 - 1),  # followed by servers with deterministic=True
            "skip_special_tokens": False,
            "no_stop_trim": True,
        }
        if params.banned_token_ids:
            sampling["logit_bias"] = {str(token): -1e9 for token in params.banned_token_ids}
        body: Json = {
            "input_ids": ids,
            "sampling_params": sampling,
            "return_logprob": True,
            "logprob_start_len": -1,
            "extra_key": f"v{server.version}",
        }
        return body | {"lora_path": adapter} if (adapter := self.adapter(server)) else body

    def read(self, answer: Json, name: str) -> Stretch:
        """See Dialect."""
        try:
            meta: dict[str, Any] = answer["meta_info"]
            pairs = meta.get("output_token_logprobs") or []
            kind = (meta["finish_reason"] or {}).get("type")
            return Stretch(
                ids=[int(pair[1]) for pair in pairs],
                logprobs=[float(pair[0]) for pair in pairs],
                finish=kind if kind in ("stop", "length") else None,
                version=int(meta["weight_version"]),
                prompt_tokens=int(meta.get("prompt_tokens") or 0),
                cached_tokens=int(meta.get("cached_tokens") or 0),
            )
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise unreadable(answer, name, error) from error

    async def probe(self, pool: ServerPool, server: Server) -> str:
        """See Dialect."""
        control = pool.limits.control
        version = str((await pool.call(server, "GET", "/server_info", None, control)).get("version", "unknown"))
        self.warn_if_untried(server, version)
        if server.version >= 0:
            await self.check_version(pool, server, server.version)
        sampling = {"max_new_tokens": 1, "temperature": 1.0}
        body: Json = {"input_ids": [1], "sampling_params": sampling, "return_logprob": True, "extra_key": "probe"}
        meta = (await pool.call(server, "POST", self.generate_path, body, control)).get("meta_info") or {}
        self.require(server, version, meta, "meta_info", ("output_token_logprobs", "finish_reason", "weight_version"))
        return version

    async def check_working(self, pool: ServerPool, server: Server, seconds: float) -> None:
        """See Dialect. Its scheduler samples a token where it is idle, and answers at once where it is not."""
        await pool.call(server, "GET", "/health_generate", None, seconds)

    async def cut_off(self, pool: ServerPool, server: Server) -> None:
        """See Dialect."""
        await pool.call(server, "POST", "/abort_request", {"abort_all": True}, pool.limits.control)

    async def pause(self, pool: ServerPool, server: Server) -> None:
        """See Dialect."""
        await pool.call(server, "POST", "/pause_generation", {"mode": "retract"}, pool.limits.control)
        await pool.call(server, "GET", "/flush_cache?timeout=10", None, pool.limits.control)

    async def go_on(self, pool: ServerPool, server: Server) -> None:
        """See Dialect."""
        await pool.call(server, "POST", "/continue_generation", {}, pool.limits.control)

    async def load_folder(self, pool: ServerPool, server: Server, folder: Path, version: int) -> None:
        """See Dialect. After most failures SGLang says that it rolled back, but it loads the new folder to do so."""
        if self.adapters:
            await self.adapter_routes.replace(pool, server, folder, version)
            renamed = {"new_version": str(self.weights_named(version)), "abort_all_requests": False}
            await pool.call(server, "POST", "/update_weight_version", renamed, pool.limits.control)
            return
        update: Json = {"model_path": str(folder), "weight_version": str(version), "flush_cache": True}
        try:
            await pool.call(server, "POST", "/update_weights_from_disk", update, LOAD_DEADLINE)
        except RefusedError as error:
            if UNTOUCHED in str(error):
                raise UntouchedError(str(error)) from error
            raise
