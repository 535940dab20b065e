"""An evaluation in one stream against nine serial loads, its tokens/s over the bare server's, and RULER-HQA by length.

    .venv/bin/python benchmarks/evaluation.py MODEL --data-path DATA [--engine sglang] [--flags "…"] [--parts …]
    .venv/bin/python benchmarks/evaluation.py MODEL --data-path DATA --engine embedded --questions 2 --samples 2 --new 8

Tells every figure on stderr as it is measured, and prints one JSON object at the end. Parts:

* `stream`: greedy and --samples answers to every problem of --suites by one `python -m evaluation`, with all it does
  (hashing, start, recording, grading); `serial`: the same answers as AReaL v0.2's evaluator gets them, one process and
  one model load for the greedy pass and for each of --loads - 1 seeds. `ratio`: serial over stream, in wall time.
* `bare`: the stream's own prompts through plain sockets to a server that runs already, no record and no grading (SGLang
  only); `tokens_ratio`: tokens/s of the stream while it sampled, over those of `bare`.
* `hqa`: seconds per document token at each number of documents, of all questions together, by the memory agent, each
  number by an evaluation of its own, all of one running server whose prefix cache is emptied before each (the embedded
  engine is loaded each time). --hqa-questions of the longest, and of shorter ones so many more as they are shorter, so
  that no length is measured in a second or two; --at-a-time of them together. `spread`: the largest over the smallest.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import yaml

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

ROOT = Path(__file__).parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--data-path", required=True)
    parser.add_argument("--engine", default="sglang", choices=("sglang", "vllm", "embedded"))
    parser.add_argument("--flags", default="", help="options of the server's own")
    parser.add_argument("--parts", default="stream,serial,bare,hqa")
    parser.add_argument("--suites", default="math_500,gsm8k")
    parser.add_argument("--questions", type=int, default=0, help="of each suite; 0: all")
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--loads", type=int, default=9)
    parser.add_argument("--new", type=int, default=512, help="longest response to a problem, in tokens")
    parser.add_argument("--documents", default="50,100,200,400,800,1600")
    parser.add_argument("--hqa-questions", type=int, default=1, help="of the longest; more of shorter documents")
    parser.add_argument("--at-a-time", type=int, default=1, help="questions of hqa under way")
    parser.add_argument("--chunk", type=int, default=1000, help="agent.chunk_tokens of hqa")
    parser.add_argument("--memory", type=int, default=128, help="agent.max_memory_tokens of hqa")
    parser.add_argument("--final", type=int, default=32, help="agent.max_final_tokens of hqa")
    parser.add_argument("--device", default="", help="cpu: hide the GPUs")
    given = parser.parse_args()
    from trainer.assets import resolve_model  # noqa: PLC0415 (after --help)

    given.model = str(resolve_model(given.model))
    found: dict[str, Any] = {"given": vars(given)}
    parts = given.parts.split(",")
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        if "stream" in parts:
            found["stream"] = one(given, work / "stream", {"n_sampling": given.samples})
            tell("stream", found["stream"])
        if "bare" in parts and given.engine == "sglang":
            found["bare"] = asyncio.run(bare(given, work))
            found["tokens_ratio"] = round(found["stream"]["tokens_per_s"] / found["bare"]["tokens_per_s"], 3)
            tell("stream over bare, tokens/s (0.95 is wanted)", found["tokens_ratio"])
        if "serial" in parts:
            found["serial"] = serial(given, work)
            found["ratio"] = round(found["serial"]["wall_s"] / found["stream"]["wall_s"], 3)
            tell("serial over stream, wall time", found["ratio"])
        if "hqa" in parts:
            found["hqa"] = asyncio.run(hqa(given, work))
            each = [row["us_per_document_token"] for row in found["hqa"].values()]
            found["spread"] = round(max(each) / min(each), 3)
            tell("spread of the time per document token (1.1 is wanted)", found["spread"])
    print(json.dumps(found, indent=2))


def tell(what: str, value: Any) -> None:
    print(f"{time.strftime('%H:%M:%S')} {what}: {json.dumps(value)}", file=sys.stderr, flush=True)


def settings(given: argparse.Namespace, output: Path, changes: dict[str, Any]) -> dict[str, Any]:
    return {
        "model_path": given.model,
        "output_path": str(output),
        "data_names": given.suites.split(","),
        "data_path": given.data_path,
        "cache_dir": str(output / "cache"),  # the checkpoint is hashed each time
        "num_questions": given.questions,
        "max_gen_tokens": given.new,
        "server": {"engine": given.engine, "flags": shlex.split(given.flags)},
        **changes,
    }


def one(given: argparse.Namespace, output: Path, changes: dict[str, Any]) -> dict[str, Any]:
    """One `python -m evaluation` from nothing to its table."""
    output.mkdir(parents=True)
    config = output / "config.yaml"
    config.write_text(yaml.safe_dump(settings(given, output, changes)))
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if given.device == "cpu" else {}
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "evaluation", str(config)],
        cwd=ROOT,
        env={**os.environ, **hidden},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(done.returncode)  # it has said why
    wall = time.perf_counter() - began
    results = json.loads((Path(json.loads(done.stdout)["results"]) / "results.json").read_text())
    samples = [
        json.loads(line)
        for path in output.glob("records/*/samples.jsonl")
        for line in path.read_text(encoding="utf-8").splitlines()
    ]
    tokens = sum(sample["sampled_tokens"] for sample in samples)
    return {
        "wall_s": round(wall, 2),
        "sampling_s": results["seconds"],
        "answers": len(samples),
        "sampled_tokens": tokens,
        "prompt_tokens": sum(sample["prompt_tokens"] for sample in samples),
        "tokens_per_s": round(tokens / results["seconds"], 1),
        "scores": {row["dataset"]: [row["greedy_acc"], row["sample_pass@1"]] for row in results["rows"]},
    }


def serial(given: argparse.Namespace, work: Path) -> dict[str, Any]:
    """A load for the greedy pass, and one for each seed with its share of the samples."""
    share = max(given.samples // (given.loads - 1), 1)
    passes = [{"n_sampling": 0}, *({"n_sampling": share, "greedy": False, "seed": n} for n in range(1, given.loads))]
    runs = []
    for number, changes in enumerate(passes):
        runs.append(one(given, work / f"serial-{number}", changes))
        tell(f"serial, load {number + 1} of {len(passes)}", {"wall_s": runs[-1]["wall_s"]})
    return {
        "wall_s": round(sum(run["wall_s"] for run in runs), 2),
        "each_s": [run["wall_s"] for run in runs],
        "answers": sum(run["answers"] for run in runs),
        "sampled_tokens": sum(run["sampled_tokens"] for run in runs),
    }


async def bare(given: argparse.Namespace, work: Path) -> dict[str, Any]:
    """The stream's prompts and sampling through plain sockets, as many at a time."""
    from sglang_engine import exchange  # noqa: PLC0415 (of the script beside this one)

    from trainer.train.model import load_tokenizer  # noqa: PLC0415

    tokenizer = load_tokenizer(Path(given.model))
    bodies = []
    for path in sorted((work / "stream").glob("records/*/questions.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            ids = tokenizer(json.loads(line)["prompt"], add_special_tokens=False)["input_ids"]
            for number in range(given.samples + 1):
                sampling = {"temperature": 0.6 if number else 0.0, "top_p": 0.95 if number else 1.0}
                sampling |= {"max_new_tokens": given.new, "stop_token_ids": [tokenizer.eos_token_id]}
                bodies.append({"input_ids": ids, "sampling_params": sampling, "return_logprob": True})
    sent = [json.dumps({**body, "logprob_start_len": -1}).encode() for body in bodies]
    async with running_server(given, work / "bare.log") as url:
        host, _, port = url.removeprefix("http://").partition(":")
        gate = asyncio.Semaphore(256)

        async def ask(body: bytes) -> int:
            async with gate:
                answer = json.loads(await exchange(host, int(port), "/generate", body))
            return len(answer["meta_info"]["output_token_logprobs"])

        await asyncio.gather(*map(ask, sent[:64]))  # warm-up
        began = time.perf_counter()
        tokens = sum(await asyncio.gather(*map(ask, sent)))
        seconds = time.perf_counter() - began
    return {"seconds": round(seconds, 2), "answers": len(sent), "tokens_per_s": round(tokens / seconds, 1)}


@asynccontextmanager
async def running_server(given: argparse.Namespace, log: Path) -> AsyncIterator[str]:
    """The address of a server of the model, ended afterwards."""
    from trainer.engines.launching import launch  # noqa: PLC0415
    from trainer.engines.options import ServerOptions  # noqa: PLC0415

    flags = tuple(shlex.split(given.flags))
    python = os.environ.get("CLUSTERKIT_VLLM_PYTHON", "") if given.engine == "vllm" else ""
    gpus = () if given.device == "cpu" else (0,)
    options = ServerOptions(Path(given.model), log, gpus=gpus, flags=flags, python=python or sys.executable)
    server, process = await launch(given.engine, options)
    try:
        yield server.url
    finally:
        await process.stop()


async def hqa(given: argparse.Namespace, work: Path) -> dict[str, Any]:
    """The memory agent over documents of growing length."""
    if given.engine == "embedded":
        return lengths(given, work, {})
    async with running_server(given, work / "hqa.log") as url:
        served = {"server": {"engine": given.engine, "url": url, "concurrency": given.at_a_time}}
        warm = {"data_names": ["ruler_hqa@50"], "num_questions": 8, "agent": agent(given)}
        await asyncio.to_thread(one, given, work / "hqa-warm", served | warm)
        return await asyncio.to_thread(lengths, given, work, served, url)


def agent(given: argparse.Namespace) -> dict[str, Any]:
    return {"chunk_tokens": given.chunk, "max_memory_tokens": given.memory, "max_final_tokens": given.final}


def forget(given: argparse.Namespace, url: str) -> None:
    """Empty the server's prefix cache: the warm-up asks what the first length asks, too."""
    from rollout import CACHES  # noqa: PLC0415 (of the script beside this one)

    httpx.post(f"{url}{CACHES[given.engine]}", timeout=60, trust_env=False).raise_for_status()


def lengths(given: argparse.Namespace, work: Path, served: dict[str, Any], url: str = "") -> dict[str, Any]:
    """An evaluation for each number of documents. served: what of the settings names the running server at `url`."""
    from evaluation.suites import Finder  # noqa: PLC0415
    from trainer.train.model import load_tokenizer  # noqa: PLC0415

    tokenizer = load_tokenizer(Path(given.model))

    def tokens(text: str) -> int:
        return len(tokenizer(text, add_special_tokens=False)["input_ids"])

    found = {}
    counts = [int(word) for word in given.documents.split(",")]
    for count in counts:
        number = given.hqa_questions * max(counts) // count
        asked = {"data_names": [f"ruler_hqa@{count}"], "num_questions": number, "agent": agent(given)}
        if url:
            forget(given, url)
        run = one(given, work / f"hqa-{count}", served | asked)
        tasks = Finder(given.data_path, limit=number).suite(f"ruler_hqa@{count}").load(tokens)
        document = sum(tokens(task.context) for task in tasks)
        found[str(count)] = {
            "questions": len(tasks),
            "sampling_s": run["sampling_s"],
            "document_tokens": document,
            "sampled_tokens": run["sampled_tokens"],
            "us_per_document_token": round(1e6 * run["sampling_s"] / document, 2),
            "scores": run["scores"],
        }
        tell(f"hqa, {count} documents", found[str(count)])
    return found


if __name__ == "__main__":
    main()
