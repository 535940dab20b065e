"""One training step of the memory workload here and in TRL, on the same GPU and the same rows.

    python3 benchmarks/peers.py TOKENIZER_FOLDER --peer-site SITE [--shape 1.5B] [--seconds 900] [--flags="…"]
        [--systems ours ours-section_first trl trl-best] [--peer-documents 8] [--micro-batch 8]
        [--keep-memory --memory 0.3 --tokens 24576]
    python3 benchmarks/peers.py TOKENIZER_FOLDER --shape tiny --documents 2 --group 2 --systems trl --no-vllm

Ours: real steps of `memory_step.py --colocated` (32 documents of four sections of about 2000 tokens, 8 trajectories
each, 256 tokens of memory, SGLang and FSDP in turns on one GPU), with the paper's order of the prompt and with the
section first. TRL: GRPOTrainer with vLLM in the same process (colocate, sleep mode, half of the memory), which knows no
turns; so the conversations of those documents are its prompts, token by token, each with as many completions of 256
tokens as a group has trajectories (`ignore_eos`). Micro-batches of 8 rows, no gradient checkpointing, fused AdamW.

* `trl` is TRL as it comes; `trl-best` is compiled, with padding to multiples of 128 so that it is compiled once, and
  without the pass that recomputes log-probs for the correction of vLLM's.
* SITE is a folder with the packages of peers.txt; TRL runs in a process of its own, with SITE instead of ours.
* --peer-documents gives TRL's step fewer documents, for a shorter run; time is compared per trajectory.

Printed, a JSON object a line: every step as soon as it is done; for every system the last step's seconds, its parts,
tokens/s (prompt and sampled) and seconds per trajectory learned from; and last how many times as long TRL takes for a
trajectory. The first step compiles and fills caches, so at least two are made and the last is told. With --out the
systems can run in several calls on one machine.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from memory_step import Case, like, logs_of, run, settings, summary, write_model

from trainer.agents.memagent import MemAgent
from trainer.config import RunConfig
from trainer.serving import registry
from trainer.serving.keeper import end_hosts
from trainer.tasks import make_source
from trainer.train.model import load_tokenizer

HERE = Path(__file__).resolve().parent
PEERS = ("trl", "trl-best")
OURS = {"ours": "paper", "ours-section_first": "section_first"}
PEER_ENVIRONMENT = {"VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}


def show(**values: Any) -> None:
    print(json.dumps(values), flush=True)


def per_trajectory(
    system: str, step_s: float, parts: dict[str, float], tokens: int, trajectories: int
) -> dict[str, Any]:
    return {
        "system": system,
        "step_s": round(step_s, 2),
        "parts_s": {name: round(seconds, 2) for name, seconds in parts.items()},
        "tokens": tokens,
        "tokens_per_s": round(tokens / step_s),
        "trajectories": trajectories,
        "s_per_trajectory": round(step_s / trajectories, 4),
    }


def conversations(config: Any, tokenizer: Any, documents: int) -> list[list[int]]:
    """Prompts of every conversation of the documents as token ids; memories are as long as they may be."""
    agent, source = MemAgent(config.agent, tokenizer), make_source(config)
    found = []
    for number in range(documents):
        prepared = agent.prepare(source.train(number))
        values = {"problem": prepared.question, "memory": agent.prompts.no_memory}
        for chunk in prepared.chunks:
            found.append(agent.prompts.update.fill({**values, "section": chunk}))
            values["memory"] = chunk[: config.agent.max_memory_tokens]
        found.append(agent.prompts.final.fill(values))
    return found


def our_options(arguments: argparse.Namespace) -> argparse.Namespace:
    same = {name: getattr(arguments, name) for name in ("flags", "keep_memory", "memory", "tokens")}
    return like(arguments, colocated=arguments.engine == "sglang", **same)


def run_ours(system: str, arguments: argparse.Namespace, work: Path, deadline: float) -> dict[str, Any] | None:
    config = settings(our_options(arguments), work / "model", work, Case(order=OURS[system]))
    config["trial_name"] = system
    try:
        steps = run(config, arguments.steps, deadline, None)
    finally:
        end_hosts(registry.folder_of(logs_of(config)))
    if not steps:
        return None
    found = summary(steps, Case())
    tokens = int(found["prompt_tokens"] + found["sampled_tokens"])
    told = per_trajectory(system, found["step_s"], found["parts_s"], tokens, arguments.documents * arguments.group)
    return told | {name: found[name] for name in ("cached_share", "mfu", "gpu_memory_peak_gib") if name in found}


def run_peer(system: str, arguments: argparse.Namespace, work: Path, deadline: float) -> dict[str, Any] | None:
    """The last step of a TRL system, all of them printed; None where there was none."""
    environment = {**os.environ, **PEER_ENVIRONMENT}
    if arguments.peer_site:
        environment["PYTHONPATH"] = str(arguments.peer_site.resolve())
    argv = [sys.executable, str(HERE / "peer_trl.py"), system, str(work)]
    log = work / f"{system}.log"
    last: dict[str, Any] | None = None
    with log.open("wb") as errors:
        process = subprocess.Popen(
            argv, env=environment, stdout=subprocess.PIPE, stderr=errors, cwd=work, start_new_session=True
        )
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        rest = b""
        try:
            while time.perf_counter() < deadline:
                ended = process.poll() is not None
                *lines, rest = (rest + (process.stdout.read() or b"")).split(b"\n")
                for line in lines:
                    if line.startswith(b'{"step": '):
                        last = json.loads(line)
                        show(**{"system": system, **last})
                if ended:
                    break
                time.sleep(0.2)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if process.returncode or last is None:
        show(failed=system, exit_code=process.returncode, log=log.read_text(errors="replace")[-3000:])
    if last is None:
        return None
    told = per_trajectory(system, last["step_s"], last["parts_s"], last["tokens"], last["trajectories"])
    return told | {name: last[name] for name in ("gpu_memory_peak_gib",) if name in last}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokenizer", help="folder with an instruction model's tokenizer (its weights are not read)")
    parser.add_argument("--peer-site", type=Path, help="folder with the packages of peers.txt; else this Python's own")
    parser.add_argument("--systems", nargs="+", choices=[*OURS, *PEERS], default=[*OURS, *PEERS])
    parser.add_argument("--shape", default="1.5B", help="a shape of memory_step.py")
    parser.add_argument("--engine", choices=("sglang", "vllm"), default="sglang", help="of ours")
    parser.add_argument("--flags", default="", help="more options for our servers")
    parser.add_argument("--keep-memory", action="store_true", help="of ours: servers and trainer keep their memory")
    parser.add_argument("--memory", type=float, default=0.0, help="of ours: share of the GPU for a server [0.5]")
    parser.add_argument("--tokens", type=int, default=32768, help="of ours: of a micro-batch")
    parser.add_argument("--steps", type=int, default=3, help="of ours")
    parser.add_argument("--peer-steps", type=int, default=2)
    parser.add_argument("--documents", type=int, default=32)
    parser.add_argument("--peer-documents", type=int, help="in TRL's step; as many as in ours")
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--micro-batch", type=int, default=8, help="TRL's, in rows; 4 fits on a GPU of 80 GB")
    parser.add_argument("--seconds", type=float, default=1500.0, help="for everything")
    parser.add_argument("--out", type=Path, help="file of results; systems that it has of this GPU are not run again")
    parser.add_argument("--no-vllm", action="store_true", help="TRL generates by itself: tries the script on a CPU")
    arguments = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):  # also where a shell in the background has them ignored
        signal.signal(number, signal.default_int_handler)
    deadline = time.perf_counter() + arguments.seconds
    found: dict[str, dict[str, Any]] = {}
    where = {"gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "", "shape": arguments.shape}
    if arguments.out and arguments.out.exists():
        known = [json.loads(line) for line in arguments.out.read_text().splitlines()]
        found = {one["system"]: one for one in known if where.items() <= one.items()}
    with tempfile.TemporaryDirectory(prefix="peers-") as name:
        work = Path(name)
        write_model(work / "model", arguments.shape, arguments.tokenizer)
        config = RunConfig.model_validate(settings(our_options(arguments), work / "model", work, Case()))
        documents = arguments.peer_documents or arguments.documents
        prompts = conversations(config, load_tokenizer(work / "model"), documents)
        turns = len(prompts) // documents
        if len(prompts) * arguments.group % arguments.micro_batch:
            parser.error(f"{len(prompts)} prompts x {arguments.group} are no whole micro-batches: change --micro-batch")
        job = {
            "prompts": prompts,
            "turns": turns,
            "group": arguments.group,
            "new": config.agent.response_limit("update"),
            "micro_batch": arguments.micro_batch,
            "steps": arguments.peer_steps,
            "vllm": not arguments.no_vllm,
        }
        (work / "job.json").write_text(json.dumps(job))
        show(peer_rows=len(prompts) * arguments.group, prompt_tokens=sum(map(len, prompts)) * arguments.group)
        for system in arguments.systems:
            one_system = run_ours if system in OURS else run_peer
            if system not in found and (result := one_system(system, arguments, work, deadline)):
                found[system] = where | result
                show(**found[system])
                if arguments.out:
                    with arguments.out.open("a") as file:
                        file.write(json.dumps(found[system]) + "\n")
    for ours in sorted(OURS.keys() & found.keys()):
        for other in sorted(found.keys() & set(PEERS)):
            times = found[other]["s_per_trajectory"] / found[ours]["s_per_trajectory"]
            show(ours=ours, peer=other, times_as_long_per_trajectory=round(times, 2))
    return 0 if found.keys() >= set(arguments.systems) else 1


if __name__ == "__main__":
    sys.exit(main())
