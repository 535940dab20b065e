"""`clusterkit data`: make the files of a task."""

from __future__ import annotations

import shlex
from pathlib import Path

from clusterkit.config.resolve import resolve
from clusterkit.data.datasets.build import build
from clusterkit.data.datasets.prepare import make_plan, refuse_unused
from clusterkit.data.datasets.reading import ReadingShape, parse_mix, parse_sizes
from clusterkit.data.datasets.texts import Shape
from clusterkit.ui import output
from trainer.config_tasks import HotpotqaConfig
from trainer.errors import InterruptedRunError

_NEXT = {
    "memagent": "clusterkit train --preset 135M_cpu --task hotpotqa",
    "memalpha": "clusterkit train --preset memalpha-4B",
    "math": "clusterkit train --preset 1.5B_n1 --task math task.dataset=train.jsonl",
}
"""Command that trains on the files of each kind but reading, without their folder."""


def prepare(
    kind: str,
    sources: list[Path],
    out: Path,
    shape: tuple[int, int, int],
    reading: tuple[int, int, str, str, float, float, int],
    test_share: float,
    most: int,
    seed: int,
    typed: list[str],
    *,
    force: bool,
    as_json: bool,
) -> None:
    """Make the files, with their card.

    Args:
        shape: questions and documents of a text, words of a chunk.
        reading: questions of a document, number, mix and documents of traces, the last two as typed, the share of the
            real questions that are in traces, and of the traces that have distractors, and sentences of their memories.
        typed: names of the options that were typed.
    """
    refuse_unused(kind, typed)
    target = out.expanduser().absolute()
    try:
        files = [source.expanduser() for source in sources]
        per_document, traces, mix, sizes, traced, distractors, sentences = reading
        learned = (parse_mix(mix), parse_sizes(sizes), traced, distractors, sentences)
        amounts = ReadingShape(per_document, traces, *learned)
        plan = make_plan(kind, files, Shape(*shape), test_share, most, seed, amounts)
        card = build(plan, target, output.note, force)
    except KeyboardInterrupt as error:
        raise InterruptedRunError(
            "interrupted: what is finished is kept; the same command goes on from there"
        ) from error
    if as_json:
        output.result_json({**card, "folder": str(target)})
        return
    what = "is there already, unchanged" if card["outcome"] == "present" else "is ready"
    output.result(f"{target} {what}")
    for name, facts in card["files"].items():
        by_source = ", ".join(f"{source} {count}" for source, count in facts["by_source"].items() if source != "rows")
        output.lines([f"  {name:22}{facts['rows']:>8} rows  {by_source}"])
    if card["left_out"]:
        output.note(f"{card['left_out']} rows were left out (without answer or evidence, or asked twice)")
    for warning in plan.warnings:
        output.note(warning)
    if kind != "reading":
        output.lines([f"next: {_NEXT[kind]} {shlex.quote(f'task.path={target}')}"])
        return
    heldout = min(card["files"][f"{split}/documents.jsonl"]["rows"] for split in ("dev", "test"))
    training = card["files"]["train/questions.jsonl"]["rows"]
    gpu, cpu = (_train_reading(name, target, heldout, training) for name in ("135M_read", "135M_read_cpu"))
    if "eval.final_documents" in gpu:
        output.note(
            f"dev or test has only {heldout} documents, and a held-out question is asked among no more than that: the "
            "commands below say so; give more texts, or raise --test-share, to ask among more"
        )
    output.lines([f"next: {gpu}", f"without a GPU: {cpu}"])


def _train_reading(preset: str, folder: Path, heldout: int, training: int) -> str:
    """Command that trains a preset, within the held-out documents and training questions that there are."""
    config = resolve(preset).config
    assert isinstance(config.task, HotpotqaConfig)
    own, final = config.task.num_documents, config.eval.final_documents
    words = ["clusterkit", "train", "--preset", preset, f"task.path={folder}"]
    own_lengths = config.task.curriculum
    if own > heldout:
        words.append(f"task.num_documents={heldout}")
        shorter = [size for size in own_lengths if size < heldout]
        if shorter != own_lengths:
            words.append(f"task.curriculum={','.join(map(str, shorter))}")
    fitting = [size for size in final if size <= heldout]
    if fitting != final:
        words.append(f"eval.final_documents={','.join(map(str, fitting))}")
    if config.rollout.batch_size > training:
        each = config.train.minibatches
        words.append(f"rollout.batch_size={max(training // each, 1) * each}")
    return shlex.join(words)
