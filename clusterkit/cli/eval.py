"""`clusterkit eval`: score a checkpoint, look at the answers, end an evaluation."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

import typer

from clusterkit.cli import actions
from clusterkit.cli.options import (
    CACHE_OPTION,
    ENGINE_OPTION,
    JSON_OPTION,
    SERVER_PYTHON_OPTION,
    SERVER_URL_OPTION,
    new_app,
)
from clusterkit.cli.runoptions import RunOptions, takes_run


def show(
    folder: str = typer.Argument("eval", metavar="FOLDER", help="Folder of results, or an output path (its newest)."),
    question: str | None = typer.Option(None, "--question", help="Number (from 1) or id; all as a list when left out."),
    dataset: str | None = typer.Option(None, "--dataset", help="Row of the table; the first when left out."),
    sample: str = typer.Option("", "--sample", help="greedy, or a number from 0; all when left out."),
    cluster: str | None = typer.Option(
        None, "--cluster", metavar="NAME", help="Copy the latest results of FOLDER from this cluster first."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print as JSON."),
) -> None:
    """Print a question with its prompt, answers, what was extracted, and the verdicts with their reasons."""
    actions.eval.show(folder, question, dataset, sample, cluster, as_json)


@takes_run("cluster", "here", "user")
def stop(
    *,
    run: RunOptions,
    output_path: str = typer.Option("eval", "--out", metavar="FOLDER", help="Folder that it writes into."),
    as_json: bool = JSON_OPTION,
) -> None:
    """End your evaluation on the current cluster in order, or that of --user; the same command goes on with it.

    --here and --cluster NAME say where it runs.
    """
    actions.eval.stop(run, output_path, as_json=as_json)


app = new_app()


@app.callback(
    invoke_without_command=True,
    examples="""
clusterkit eval
clusterkit eval --model-path tiny-recall/run1 --out scores
clusterkit eval --data-names math_500 --n-sampling 8
clusterkit eval --watch-dir runs/checkpoints --once
""",
)
@takes_run("fileroot", "cluster", "here")
def evaluate(
    context: typer.Context,
    *,
    run: RunOptions,
    model_path: str | None = typer.Option(
        None,
        "--model-path",
        metavar="MODEL",
        help="Checkpoint: a folder, EXPERIMENT/TRIAL (its newest) or an asset; the newest run's newest when left out. "
        "On a cluster also NAME of /storage/models.",
    ),
    output_path: str = typer.Option("eval", "--out", metavar="FOLDER", help="Folder for answers, verdicts and tables."),
    data_names: str | None = typer.Option(
        None,
        "--data-names",
        metavar="LIST",
        help="Suites, with commas: math_500,aime24,aime25,amc23,gsm8k, ruler_hqa@50, niah_single@8k, recall@16 ..., or "
        "JSON-lines files; the run's own task when left out.",
    ),
    data_path: str = typer.Option(
        "",
        "--data-path",
        metavar="FOLDER",
        help="Folder that data are looked for in first; on a cluster one of this machine, or below its storage.",
    ),
    num_questions: int = typer.Option(0, "--num-questions", help="Only the first so many questions of each; 0: all."),
    max_gen_tokens: int = typer.Option(
        0, "--max-gen-tokens", help="Longest response to a problem [32768, or what fits]."
    ),
    n_sampling: int = typer.Option(
        -1, "--n-sampling", help="Sampled answers a question [problems: 32, memory suites: 0]."
    ),
    temperature: float = typer.Option(0.6, "--temperature", help="Of the sampled answers."),
    top_p: float = typer.Option(0.95, "--top-p", help="Of the sampled answers."),
    top_k: int = typer.Option(-1, "--top-k", help="Of the sampled answers; -1: off."),
    seed: int = typer.Option(0, "--seed", help="Of the sampled answers."),
    greedy: bool = typer.Option(True, "--greedy/--no-greedy", help="One greedy answer to every question as well."),
    prompt_type: str = typer.Option(
        "auto", "--prompt-type", help="Prompt template of problems [the tokenizer's chat template]."
    ),
    methods: str = typer.Option(
        "memagent",
        "--methods",
        metavar="LIST",
        help="How documents are read, with commas: memagent, blank_memory, long_context, rag (BM25), gold, no_context.",
    ),
    preset: str | None = typer.Option(
        None, "--preset", metavar="NAME", help="Preset whose agent settings hold, for a checkpoint from elsewhere."
    ),
    engine: str = ENGINE_OPTION,
    server_url: str = SERVER_URL_OPTION,
    server_python: str = SERVER_PYTHON_OPTION,
    server_flag: Annotated[
        list[str] | None, typer.Option(metavar="OPTION", help="A further option of the server's own; repeatable.")
    ] = None,
    gpus: int = typer.Option(0, "--gpus", help="GPUs for servers; 0: all."),
    tensor_parallel: int = typer.Option(1, "--tensor-parallel", help="GPUs of one server."),
    percent_lenient: bool = typer.Option(
        False, "--percent-lenient", help="Also right: a hundred times or a hundredth of the truth, as AReaL counts."
    ),
    last_number: bool = typer.Option(
        False, "--last-number", help="Take the last number where no answer is marked, as AReaL does."
    ),
    compare: Annotated[
        list[str] | None,
        typer.Option(metavar="FOLDER", help="Earlier results to compare with, question by question; repeatable."),
    ] = None,
    setting: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Any other setting, such as agent.chunk_tokens=512."),
    ] = None,
    cache_dir: str = CACHE_OPTION,
    watch: str | None = typer.Option(
        None,
        "--watch-dir",
        metavar="FOLDER",
        help="Score every checkpoint below FOLDER, and each new one as it appears; on a cluster: of EXPERIMENT/TRIAL.",
    ),
    once: bool = typer.Option(False, "--once", help="With --watch-dir: end after the checkpoints that are there."),
    slurm: bool = typer.Option(False, "--slurm", hidden=True, help="Refused, with the command that does it."),
    detach: bool = typer.Option(False, "--detach", help="On a cluster: do not wait for the end."),
    dry_run: bool = typer.Option(False, "--dry-run", help="Print the configuration; ask nothing."),
    as_json: bool = typer.Option(False, "--json", help="Print the results as JSON."),
    no_progress: bool = typer.Option(False, "--no-progress", help="Show no progress."),
) -> None:
    """Score a checkpoint on mathematics and memory suites: a table, its intervals, and every verdict with its reason.

    A checkpoint of a run of this machine is scored here, all else on the current cluster (clusterkit use); --here and
    --cluster NAME say otherwise. What was answered is never asked again: a killed evaluation goes on with the same
    command. clusterkit eval show FOLDER --question K prints one answer; FOLDER/index.html has all that are wrong.
    """
    if context.invoked_subcommand is not None:
        return
    names = [name for name in (data_names or "").split(",") if name.strip()]
    values: dict[str, Any] = {
        "num_questions": num_questions,
        "prompt_type": prompt_type,
        "max_gen_tokens": max_gen_tokens,
        "greedy": greedy,
        "n_sampling": n_sampling,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "seed": seed,
        "methods": [method.strip().replace("-", "_") for method in methods.split(",") if method.strip()],
        "percent_lenient": percent_lenient,
        "last_number": last_number,
        "server": {
            "engine": engine,
            "url": server_url,
            "python": server_python,
            "flags": server_flag or [],
            "gpus": gpus,
            "tensor_parallel": tensor_parallel,
        },
    }
    by_itself = run.cluster is None and bool(server_url or cache_dir)  # a server or a folder of this machine
    arguments = {
        "model_path": model_path,
        "output_path": output_path,
        "data_names": tuple(names),
        "data_path": data_path,
        "cache_dir": cache_dir,
        "preset": preset,
        "compare": tuple(compare or ()),
        "settings": tuple(setting or ()),
        "values": values,
        "fileroot": run.fileroot,
        "watch": watch or "",
        "once": once,
    }
    actions.eval.evaluate(
        arguments,
        replace(run, here=run.here or by_itself),
        slurm=slurm,
        detach=detach,
        dry_run=dry_run,
        as_json=as_json,
        shown=not no_progress,
    )


app.command(
    examples="""
clusterkit eval show
clusterkit eval show scores --question 3 --sample greedy
"""
)(show)
app.command(
    examples="""
clusterkit eval stop
clusterkit eval stop --cluster lab --out scores
"""
)(stop)
