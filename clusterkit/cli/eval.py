"""`clusterkit eval`: score a checkpoint, and look at the answers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clusterkit.cli.eval_show import show, stop
from clusterkit.cli.target import FILEROOT_OPTION, RUNS, Typed, folder_of_runs, for_checkpoint, told
from clusterkit.ui import output
from trainer.errors import UserError

if TYPE_CHECKING:
    from clusterkit.evaluate.process import Finished
    from clusterkit.evaluate.remote import Wanted
    from evaluation.config import EvalConfig, WatchConfig

_CHOOSES_ITSELF = "--watch chooses the checkpoints itself: leave --model-path out"

app = typer.Typer(rich_markup_mode=None, add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})


@app.callback(invoke_without_command=True)
def evaluate(
    context: typer.Context,
    *,
    model_path: str | None = typer.Option(
        None,
        "--model-path",
        "--model_path",
        help="Checkpoint: a folder, EXPERIMENT/TRIAL (its newest) or an asset; the newest run's newest when left out. "
        "On a cluster also NAME of /storage/models.",
    ),
    output_path: str = typer.Option(
        "eval", "--output-path", "--output_path", help="Folder for answers, verdicts and tables."
    ),
    data_names: str | None = typer.Option(
        None,
        "--data-names",
        "--data_names",
        help="Suites, with commas: math_500,aime24,aime25,amc23,gsm8k, ruler_hqa@50, niah_single@8k, recall@16 …, or "
        "JSON-lines files; the run's own task when left out.",
    ),
    data_path: str = typer.Option(
        "",
        "--data-path",
        help="Folder that data are looked for in first; on a cluster one of this machine, or below its storage.",
    ),
    num_questions: int = typer.Option(0, "--num-questions", help="Only the first so many questions of each; 0: all."),
    max_gen_tokens: int = typer.Option(
        0, "--max-gen-tokens", "--max_gen_tokens", help="Longest response to a problem [32768, or what fits]."
    ),
    n_sampling: int = typer.Option(
        -1, "--n-sampling", "--n_sampling", help="Sampled answers a question [problems: 32, memory suites: 0]."
    ),
    temperature: float = typer.Option(0.6, "--temperature", help="Of the sampled answers."),
    top_p: float = typer.Option(0.95, "--top-p", "--top_p", help="Of the sampled answers."),
    top_k: int = typer.Option(-1, "--top-k", "--top_k", help="Of the sampled answers; -1: off."),
    seed: int = typer.Option(0, "--seed", help="Of the sampled answers."),
    greedy: bool = typer.Option(True, "--greedy/--no-greedy", help="One greedy answer to every question as well."),
    prompt_type: str = typer.Option(
        "auto", "--prompt-type", "--prompt_type", help="Prompt template of problems [the tokenizer's chat template]."
    ),
    methods: str = typer.Option(
        "memagent",
        "--methods",
        help="How documents are read, with commas: memagent, long_context, rag (BM25), no_context.",
    ),
    preset: str | None = typer.Option(
        None, "--preset", help="Preset whose agent settings hold, for a checkpoint from elsewhere."
    ),
    engine: str = typer.Option("auto", "--engine", help="embedded, sglang, vllm; with --server-url: openai."),
    server_url: str = typer.Option(
        "", "--server-url", help="A running server: with OpenAI's /v1/completions, or of the --engine that is named."
    ),
    server_python: str = typer.Option("", "--server-python", help="Interpreter that has SGLang or vLLM."),
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
    cache_dir: str = typer.Option("", "--cache-dir", help="Asset cache."),
    fileroot: str | None = FILEROOT_OPTION,
    watch: str | None = typer.Option(
        None,
        "--watch",
        metavar="DIR",
        help="Score every checkpoint below DIR, and each new one as it appears; on a cluster: of EXPERIMENT/TRIAL.",
    ),
    once: bool = typer.Option(False, "--once", help="With --watch: end after the checkpoints that are there."),
    cluster: str | None = typer.Option(
        None,
        "--cluster",
        metavar="NAME",
        help="Evaluate on that cluster, as a job of its Ray; results are copied here.",
    ),
    here: bool = typer.Option(False, "--here", help="Evaluate on this machine, whichever cluster is current."),
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

    shown = (lambda _: None) if no_progress else output.note
    by_itself = cluster is None and (server_url or cache_dir)  # a server or a folder of this machine
    cluster = told(for_checkpoint(watch or model_path, Typed(cluster, here or bool(by_itself), fileroot)))
    if cluster is not None:
        if watch is not None and model_path is not None:
            raise UserError(_CHOOSES_ITSELF)
        from clusterkit.evaluate.remote import Wanted  # noqa: PLC0415

        words = (model_path, output_path, tuple(names), data_path, preset, tuple(compare or ()), tuple(setting or ()))
        wanted = Wanted(*words, values, fileroot or RUNS, watch or "", once)
        _evaluate_on(cluster, wanted, detach=detach, dry_run=dry_run, as_json=as_json, shown=shown)
        return
    if detach:
        raise UserError("--detach belongs to --cluster: an evaluation of this machine ends with its command")
    values |= {
        "output_path": str(Path(output_path).expanduser().absolute()),
        "data_path": _absolute(data_path),
        "cache_dir": cache_dir,
        "compare": [_absolute(folder) for folder in compare or ()],
    }

    def request(checkpoint: str) -> EvalConfig:
        from clusterkit.evaluate.request import default_names, make_request, run_settings  # noqa: PLC0415

        settings = run_settings(checkpoint, preset)
        asked = [_absolute(n) if "/" in n or n.endswith(".jsonl") else n for n in names] or default_names(settings)
        return make_request({**values, "model_path": checkpoint, "data_names": asked}, settings, setting or ())

    if watch is not None:
        from clusterkit.evaluate.watch import watch_folder  # noqa: PLC0415

        if model_path is not None:
            raise UserError(_CHOOSES_ITSELF)
        watch_folder(Path(watch).expanduser().absolute(), request, shown, once=once, as_json=as_json)
        return
    from clusterkit.evaluate.request import choose_checkpoint  # noqa: PLC0415

    config = request(choose_checkpoint(model_path, folder_of_runs(fileroot)))
    from clusterkit.evaluate.process import require_evaluator, run_evaluation  # noqa: PLC0415

    if dry_run:
        _print_plan(config, as_json)
    require_evaluator()
    if dry_run:
        return
    _print_results(run_evaluation(config, shown, output.debug), as_json)


def _evaluate_on(
    cluster: str, wanted: Wanted, *, detach: bool, dry_run: bool, as_json: bool, shown: Callable[[str], None]
) -> None:
    from clusterkit.cli.eval_cluster import evaluate_on, planned  # noqa: PLC0415

    if dry_run:
        _print_plan(planned(cluster, wanted), as_json)
        return
    finished = evaluate_on(cluster, wanted, detach=detach, as_json=as_json, say=shown)
    if finished is not None:
        _print_results(finished, as_json)


def _print_plan(config: EvalConfig | WatchConfig, as_json: bool) -> None:
    from clusterkit.evaluate.request import settings_in_words  # noqa: PLC0415

    if as_json:
        output.result_json(config.model_dump())
    else:
        output.result("\n".join(f"{key}={value}" for key, value in settings_in_words(config).items()))


def _print_results(finished: Finished, as_json: bool) -> None:
    """Write the pages, print the table, and end with code 1 where answers are missing."""
    from clusterkit.evaluate.pages import write_pages  # noqa: PLC0415

    page = write_pages(finished.folder)
    if as_json:
        output.result_json(finished.results)
    else:
        output.result((finished.folder / "table.txt").read_text(encoding="utf-8"))
        output.note(f"Results: {finished.folder}. Answers that are wrong: {page}")
    if not finished.complete:
        missing = sum(row["missing"] for row in finished.results["rows"])
        output.error(
            f"incomplete: {missing} answers failed and count as wrong here; the same command asks for them again"
        )
        raise typer.Exit(1)


app.command()(show)
app.command()(stop)


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().absolute()) if path else ""
