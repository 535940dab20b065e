"""One training step of the memory-agent workload, or of mathematics, in its parts; asynchronous over synchronous time.

    python3 benchmarks/memory_step.py TOKENIZER_FOLDER [--shape 1.5B] [--staleness 0 1] [--steps 6] [--seconds 600]
        [--flags="…"] [--colocated] [--orders paper section_first] [--sharing on off] [--lora 64]
        [--allocation "sglang:d4|fsdp:d4s2"] [--workload math] [--set KEY=VALUE]
    python3 benchmarks/memory_step.py TOKENIZER_FOLDER --shape tiny --engine vllm --steps 3 --documents 2 --group 2

Real runs of the trainer (`python -m trainer`) with random weights of a shape: 32 documents of four sections of about
2000 tokens, 8 trajectories each, 256 tokens of memory, rewards by the toss of a coin so that everything is trained on.
SGLang samples on GPU 0, FSDP trains on GPU 1, weights go over NCCL; with --colocated both share GPU 0, weights go
through CUDA IPC, and what is not used lies in host memory (train.offload). --allocation says it for more GPUs, in the
words of allocation_mode. All runs use the servers of the first one, unless these hand memory over or are gone. A run is
ended after --steps steps, or when --seconds, counted from the start of the script, are over; on an H200 with the 1.5B
shape the server takes 70 to 100 s and the first step, which compiles, 38 to 65 s.

With --lora adapters of that rank are trained in place of all weights (docs/lora.md). With --workload memagent sections
have 5,000 tokens and memories 1,024 (--group 16 is MemAgent's, --shape 7B its width: --layers 12 have room on a GPU of
141 GB with --keep-activations full --memory 0.2, and --tokens 40960 for a group's rows of a turn). With --workload math
a prompt is a short problem and a response has --response tokens, with nothing to share beyond the problem.

A case is a staleness, an order of the prompt (`agent.prompt_order`), whether shared prefixes are read and computed
once (`train.share_prefixes`, `rollout.share_prefixes`), and how many servers share a broadcast of weights. Printed, a
JSON object a line: every step as soon as it is done, with its parts in seconds; for every case the median step after
the first two, its parts, tokens/s of sampling and training, MFU, |policy ratio - 1|; and last each case's step over
that of the first, and the asynchronous step over the synchronous one. The physical limit of the asynchronous step is
the longer of the two halves of the synchronous one: `of_limit` is that over its own time.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import yaml
from shapes import SHAPES, config_of
from transformers import AutoModelForCausalLM, AutoTokenizer

from trainer.allocation import Allocation, AllocationError
from trainer.allocation_text import parse as parse_allocation
from trainer.config import RunConfig
from trainer.paths import RunPaths
from trainer.placement import gives_memory_away, local_places
from trainer.serving import registry
from trainer.serving.keeper import config_file, end_hosts, host_command, placed, start_host

ROOT = Path(__file__).resolve().parents[1]
TOLD = ("mfu", "train_row_tokens_per_s", "rollout_tokens_per_s", "decode_roofline", "cached_share", "mismatch_logp")
"""Of every step, should the run be ended before its case is summed up."""


class Coin:
    """A reward that knows nothing: every group has something to learn from."""

    def __init__(self, _config: Any) -> None:
        self._coin = random.Random(0)

    def score(self, _task: Any, _trajectory: Any) -> float:
        return float(self._coin.random() < 0.5)


def write_model(folder: Path, shape: str, tokenizer: str, layers: int = 0) -> None:
    torch.manual_seed(0)
    config = config_of(shape, layers)
    config.bos_token_id, config.eos_token_id = 0, 2
    if shape == "tiny":  # the vocabulary of the tokenizer, and heads as vLLM wants them
        config.vocab_size, config.hidden_size, config.head_dim = (
            49152,
            128,
            32,
        )
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        lm = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    lm.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tokenizer).save_pretrained(folder)


@dataclass(frozen=True)
class Case:
    """One run of the trainer."""

    staleness: int = 0
    order: str = "paper"
    sharing: str = "on"
    servers_per_group: int = 16

    @property
    def name(self) -> str:
        return f"staleness-{self.staleness}-{self.order}-sharing-{self.sharing}-groups-of-{self.servers_per_group}"


def allocation_of(arguments: argparse.Namespace) -> Allocation:
    """The allocation that was asked for. Raises AllocationError."""
    return parse_allocation(arguments.allocation or f"sglang:d1{'|' if arguments.colocated else '+'}fsdp:d1")


def settings(arguments: argparse.Namespace, model: Path, work: Path, case: Case) -> dict[str, Any]:
    allocation = None if arguments.engine == "vllm" else allocation_of(arguments)
    colocated = arguments.colocated if allocation is None else allocation.colocated
    config: dict[str, Any] = {
        "experiment_name": "memory-step",
        "trial_name": case.name,
        "fileroot": str(work / "runs"),
        "code_dir": str(ROOT / "benchmarks"),
        "n_gpus_per_node": allocation.gpus if allocation else 0,
        "allocation_mode": str(allocation or ""),
        "servers": {
            "engine": arguments.engine,
            "flags": shlex.split(arguments.flags),
            "shutdown_on_exit": colocated,
        },
        "model": {"path": str(model), "dtype": "bfloat16", "lora": {"rank": arguments.lora}}
        | {"gradient_checkpointing": arguments.keep_activations},
        **WORKLOADS[arguments.workload](arguments, work, case),
        "reward": {"name": "memory_step:Coin"},
        "weights": {"servers_per_group": case.servers_per_group}
        | ({"adapters": arguments.adapters} if arguments.lora else {}),
        "rollout": {
            "batch_size": arguments.documents,
            "group_size": arguments.group,
            "max_staleness": case.staleness,
            "share_prefixes": case.sharing == "on",
            "gpu_memory_fraction": arguments.memory or (0.5 if colocated else 0.85),
            "save_trajectories": False,
        },
        # More steps than are wanted: a run that comes to its end evaluates and writes checkpoints.
        "train": {"total_steps": 1000, "learning_rate": 1e-6, "max_tokens_per_mb": arguments.tokens}
        | {"offload": colocated and not arguments.keep_memory, "share_prefixes": case.sharing == "on"},
        "eval": {"every_steps": 0, "num_tasks": 1, "blank_memory": False},
        "checkpoint": {"ckpt_first_step": 1000, "ckpt_freq_secs": 1e9, "save_freq_epochs": 0},
        "monitor": {"tensorboard": False},
    }
    for setting in arguments.settings:
        key, _, value = setting.partition("=")
        *path, leaf = key.split(".")
        section = config
        for name in path:
            section = section.setdefault(name, {})
        section[leaf] = yaml.safe_load(value)
    return config


LENGTHS = {"memory": (215, 2048, 256), "memagent": (700, 5120, 1024), "tiny": (20, 512, 8)}
"""Sentences of a section, and the most tokens of it and of a memory."""


def memory_agents(arguments: argparse.Namespace, _work: Path, case: Case) -> dict[str, Any]:
    """Task and agent: documents of four sections."""
    filler, section, memory = LENGTHS["tiny" if arguments.shape == "tiny" else arguments.workload]
    return {
        "task": {
            "name": "needles",
            "min_chunks": 4,
            "max_chunks": 4,
            "filler_per_chunk": filler,
            "facts_per_chunk": 2,
        },
        "agent": {
            "template": "memagent",
            "prompt_order": case.order,
            "chunk_tokens": section,
            "max_question_tokens": 64,
            "max_memory_tokens": memory,
            "max_final_tokens": memory,
        },
    }


def mathematics(arguments: argparse.Namespace, work: Path, _case: Case) -> dict[str, Any]:
    """Task and agent: short problems with long responses."""
    file, draw = work / "problems.jsonl", random.Random(0)
    problems = ([draw.randrange(10_000) for _ in range(12)] for _ in range(4096))
    lines = (
        {
            "prompt": f"What is {' + '.join(map(str, terms))}?",
            "query_id": str(n),
            "solutions": [f"\\boxed{{{sum(terms)}}}"],
        }
        for n, terms in enumerate(problems)
    )
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return {
        "task": {"name": "math", "path": str(file), "eval_fraction": 0.01},
        "agent": {"name": "single_turn", "max_question_tokens": 256, "max_final_tokens": arguments.response},
    }


WORKLOADS = {"memory": memory_agents, "memagent": memory_agents, "math": mathematics}


def logs_of(config: dict[str, Any]) -> Path:
    return RunPaths.of(RunConfig.model_validate(config)).logs


def start_servers(config: dict[str, Any], deadline: float) -> list[subprocess.Popen[bytes]]:
    """Start a run's servers on shared GPUs before it: a run's own would end with it. They end with this process.

    Returns their hosts, to be kept: a host ends when its standard input closes.
    """
    parsed = RunConfig.model_validate(config)
    folder = registry.folder_of(RunPaths.of(parsed).logs)
    file = config_file(parsed, folder)
    hosts, logs = [], []
    for place in local_places(parsed):
        command = host_command(file, Path(parsed.model.path), place.name, kept=True, tied=True)
        logs.append(folder / f"{place.name}.host.log")
        hosts.append(start_host(placed(command, place.gpus, "127.0.0.1"), logs[-1], tied=True))
    while len(found := registry.read(folder)) < len(hosts) or any(one.state != "ready" for one in found):
        if time.perf_counter() > deadline or any(host.poll() is not None for host in hosts):
            end_servers(hosts)
            print(
                json.dumps({"failed": "servers", "log": "".join(log.read_text() for log in logs)[-2000:]}), flush=True
            )
            raise SystemExit("the servers did not start")
        time.sleep(0.2)
    return hosts


def end_servers(hosts: list[subprocess.Popen[bytes]]) -> None:
    for host in hosts:
        host.terminate()
    for host in hosts:
        host.wait()


def still_there(logs: Path) -> bool:
    """Whether all servers that the run with these logs used can be used again."""
    found = registry.read(registry.folder_of(logs))
    return bool(found) and all(one.state == "ready" and one.host_runs() for one in found)


def run(config: dict[str, Any], steps: int, deadline: float, before: Path | None) -> list[dict[str, Any]]:
    """The step records of one run of the trainer, each printed when it is there. before: logs of a run whose server is
    still there.
    """
    logs = logs_of(config)
    file = logs.with_name(f"{logs.name}.yaml")
    servers = registry.folder_of(logs)
    servers.mkdir(parents=True, exist_ok=True)
    for one in registry.read(registry.folder_of(before)) if before else []:
        registry.write(servers, one)
    file.write_text(yaml.safe_dump(config))
    paths = [str(ROOT), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    found: list[dict[str, Any]] = []
    trainer = subprocess.Popen([sys.executable, "-m", "trainer", str(file)], env=environment)
    try:
        while len(found) < steps and trainer.poll() is None and time.perf_counter() < deadline:
            time.sleep(0.2)
            found += show_new(logs / "metrics.jsonl", len(found))
    finally:
        trainer.kill()
        trainer.wait()
    found += show_new(logs / "metrics.jsonl", len(found))
    if not found:
        print(json.dumps({"failed": config["trial_name"], "log": (logs / "main.log").read_text()[-2000:]}), flush=True)
    return found[:steps]


def show_new(metrics: Path, known: int) -> list[dict[str, Any]]:
    """Print and return the steps that were not known yet."""
    lines = metrics.read_text().split("\n")[:-1] if metrics.exists() else []
    steps = [r for line in lines if line and (r := json.loads(line))["kind"] == "step"][known:]
    for step in steps:
        stats = {name: step["stats"][name] for name in TOLD if name in step["stats"]}
        told = {"step": step["global_step"], "step_s": step["step_time_s"], "parts_s": step["timings"], **stats}
        print(json.dumps(told), flush=True)
    return steps


def summary(steps: list[dict[str, Any]], case: Case) -> dict[str, Any]:
    used = steps[2:] or steps[-1:]

    def median(value: Any) -> float:
        return round(statistics.median(value(step) for step in used), 4)

    stats = used[0]["stats"]
    parts = {name: median(lambda s, n=name: s["timings"].get(n, 0.0)) for name in used[0]["timings"]}
    wanted = ("mfu", "train_tokens_per_s", "mismatch_kl", "behave_ratio_max_dev", "staleness_mean", "staleness_max")
    wanted += ("weights_pause_s", "weights_transfer_s", "weights_resume_s", "gpu_memory_peak_gib", "gpu_alloc_retries")
    wanted += ("prompt_tokens", "sampled_tokens", "trained_tokens", "rollout_tokens_per_s", "decode_roofline")
    wanted += ("cached_share", "shareable_share", "mismatch_logp", "train_row_tokens_per_s", "train_shared")
    wanted += ("mfu_of_rows",)
    return {
        **asdict(case),
        "steps_used": len(used),
        "step_s": median(lambda s: s["step_time_s"]),
        "parts_s": parts,
        **{name: median(lambda s, n=name: s["stats"][n]) for name in wanted if name in stats},
    }


def parse(argv: list[str] | None = None, description: str | None = __doc__) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokenizer", help="folder with an instruction model's tokenizer (its weights are not read)")
    parser.add_argument("--shape", choices=SHAPES, default="1.5B")
    parser.add_argument("--layers", type=int, default=0, help="of the model; 0: as many as the shape has")
    parser.add_argument("--engine", choices=("sglang", "vllm"), default="sglang")
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=1200.0)
    parser.add_argument("--colocated", action="store_true", help="server and trainer on GPU 0")
    parser.add_argument(
        "--allocation", default="", help="in place of --colocated: sglang:d4|fsdp:d4, sglang:d2+fsdp:d2"
    )
    parser.add_argument("--workload", choices=WORKLOADS, default="memory")
    parser.add_argument("--response", type=int, default=2048, help="tokens of a response of --workload math")
    parser.add_argument("--set", action="append", default=[], dest="settings", metavar="KEY=VALUE", help="of the runs")
    parser.add_argument("--orders", nargs="+", choices=("paper", "section_first"), default=["paper"])
    parser.add_argument("--sharing", nargs="+", choices=("on", "off"), default=["on"], help="of prompts' prefixes")
    grouping = "servers that one NCCL broadcast reaches"
    parser.add_argument("--servers-per-group", type=int, nargs="+", default=[16], help=grouping)
    parser.add_argument("--documents", type=int, default=32)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--lora", type=int, default=0, metavar="RANK", help="train adapters of this rank")
    parser.add_argument(
        "--adapters", choices=("auto", "merged", "alone"), default="auto", help="what servers get of them"
    )
    parser.add_argument("--memory", type=float, default=0.0, help="share of a GPU for a server [0.5 or 0.85]")
    parser.add_argument("--keep-activations", default="none", help="model.gradient_checkpointing: none, full, …")
    parser.add_argument("--tokens", type=int, default=32768, help="of a micro-batch")
    parser.add_argument(
        "--keep-memory", action="store_true", help="servers and ranks on shared GPUs without train.offload"
    )
    parser.add_argument("--flags", default="", help="more options for the servers")
    arguments = parser.parse_args(argv)
    try:
        arguments.colocated = allocation_of(arguments).colocated
    except AllocationError as error:
        parser.error(f"--allocation: {error}")
    if arguments.colocated and not arguments.keep_memory and arguments.staleness != [0]:
        parser.error("servers and ranks that hand memory over take turns: add --staleness 0, or --keep-memory")
    return arguments


def like(given: argparse.Namespace, **more: Any) -> argparse.Namespace:
    """What `settings` wants to know, for another script that has options of the same names."""
    same = {name: getattr(given, name) for name in ("shape", "engine", "documents", "group")}
    return argparse.Namespace(**{**vars(parse([given.tokenizer])), **same, **more})


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # servers are ended, also where a shell has them ignored
        signal.signal(number, signal.default_int_handler)
    arguments = parse()
    if not Path(arguments.tokenizer).is_dir():
        raise SystemExit(f"{arguments.tokenizer}: no such folder; give one with an instruction model's tokenizer")
    found: dict[Case, dict[str, Any]] = {}
    began = time.perf_counter()
    deadline = began + arguments.seconds
    with tempfile.TemporaryDirectory(prefix="memory-step-") as name:
        work = Path(name)
        write_model(work / "model", arguments.shape, arguments.tokenizer, arguments.layers)
        print(json.dumps({"model_written_s": round(time.perf_counter() - began, 1)}), flush=True)
        logs: list[Path] = []
        hosts: list[subprocess.Popen[bytes]] = []
        try:
            for case in itertools.starmap(
                Case,
                itertools.product(
                    arguments.staleness, arguments.orders, arguments.sharing, arguments.servers_per_group
                ),
            ):
                if time.perf_counter() > deadline:
                    print(json.dumps({"left_out": case.name, "why": "--seconds are over"}), flush=True)
                    continue
                config = settings(arguments, work / "model", work, case)
                logs.append(logs_of(config))
                hand_over = gives_memory_away(RunConfig.model_validate(config))
                before = logs[-2] if len(logs) > 1 and not hand_over else None
                if arguments.colocated and not hand_over and not (before and still_there(before)):
                    end_servers(hosts)
                    hosts, before = start_servers(config, deadline), None
                steps = run(config, arguments.steps, deadline, before)
                if hand_over:  # the next ones need their memory
                    end_hosts(registry.folder_of(logs[-1]))
                if steps:
                    found[case] = summary(steps, case)
                    print(json.dumps(found[case]), flush=True)
        finally:
            end_servers(hosts)
            for one in logs:
                end_hosts(registry.folder_of(one))
    if not found:
        return
    first = next(iter(found))
    for case, one in found.items():
        told = {"case": case.name, f"over_{first.name}": round(one["step_s"] / found[first]["step_s"], 3)}
        sync = found.get(replace(case, staleness=0))
        if case.staleness and sync is not None:
            halves = max(sync["parts_s"]["rollout"], sync["parts_s"]["train"])
            told |= {"async_over_sync": round(one["step_s"] / sync["step_s"], 3)}
            told |= {"of_limit": round(halves / one["step_s"], 3)}
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
