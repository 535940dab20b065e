"""A cluster's status as text for people."""

from __future__ import annotations

from clusterkit.backends.ray.status import ClusterStatus, exit_marks
from clusterkit.common.text_plot import iso_time, size
from clusterkit.ui.run_status import status_lines

SHOWN_ENDS = 3
INTERRUPTED = 130


def cluster_lines(status: ClusterStatus) -> list[str]:
    """The run first, then what it runs on, then what could not be seen."""
    lines = _run_lines(status)
    rows = [("", ""), ("cluster", _nodes(status)), *(("problem", text) for text in status.nodes.all_problems)]
    if status.disk is not None:
        rows.append(("storage", f"{status.disk.path}: {size(status.disk.free)} of {size(status.disk.size)} free"))
    if status.job is not None:
        rows.append(("job", f"{status.job.submission_id}: {status.job.status.lower()}"))
    rows += [("not seen", text) for text in status.unseen]
    rows.append(("observed", iso_time(status.observed_at)))
    return [*lines, *(f"{label:<12} {text}".rstrip() for label, text in rows)]


def _run_lines(status: ClusterStatus) -> list[str]:
    if status.run is None:
        seen = "no run was found" if not status.unseen else "runs could not be looked at"
        return [f"{'run':<12} {seen} on cluster {status.cluster}"]
    lines = status.with_original_paths(status_lines(status.run))
    marks = exit_marks(status.run.run).items()
    ends = [(number, mark) for number, mark in marks if mark.get("code") not in (0, INTERRUPTED)]
    for number, mark in ends[-SHOWN_ENDS:]:
        text = str(mark.get("message") or f"exit code {mark.get('code')}").splitlines()[0]
        lines.append(f"{'attempt ' + str(number):<12} ended after step {mark.get('global_step')}: {text}")
    return lines


def _nodes(status: ClusterStatus) -> str:
    nodes = [node for node in status.nodes.nodes if node.role != "other"]
    alive = [node for node in nodes if node.ray_state == "ALIVE"]
    gpus, wanted = sum(node.gpus for node in alive), sum(node.gpus_expected for node in nodes)
    return f"{status.cluster}: {len(alive)} of {len(nodes)} nodes and {gpus} of {wanted} GPUs alive in Ray"
