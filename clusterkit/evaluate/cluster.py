"""Evaluations as jobs of a cluster's Ray, with their results copied to this machine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path, PurePosixPath

from clusterkit.backends.ray.backend import RayBackend
from clusterkit.backends.ray.head import Head
from clusterkit.evaluate.job import copy_results, follow, follow_watch, newest_results, stop, submit
from clusterkit.evaluate.process import Finished
from clusterkit.evaluate.remote import copied_from, output_folder, remote_request
from clusterkit.evaluate.request import EvalArguments, SubmittedEval
from clusterkit.runs.directory import FILEROOT
from evaluation.config import EvalConfig, WatchConfig
from evaluation.results import find_results
from evaluation.steps import keep_scores
from trainer.disk import file_failures
from trainer.errors import InterruptedRunError


class ClusterEvaluator:
    """`clusterkit.evaluate.table.Evaluator` of a cluster."""

    def __init__(self, backend: RayBackend) -> None:
        self._cluster = backend
        self._source: Path | None = None
        """The checkpoint of a run of this machine that was copied there: its scores come back to that run."""

    def plan(self, arguments: EvalArguments) -> EvalConfig | WatchConfig:
        """See `Evaluator.plan`."""
        return self._cluster.do(lambda head: remote_request(head, arguments, lambda _: None, change=False))

    def require(self) -> None:
        """See `Evaluator.require`: the runtime image has it all."""

    def start(self, arguments: EvalArguments, *, detach: bool) -> SubmittedEval:  # noqa: ARG002 (any can be)
        """See `Evaluator.start`. What is missing on the storage is copied to it."""

        async def submit_request(head: Head) -> SubmittedEval:
            request = await remote_request(head, arguments, self._cluster.say)
            self._source = copied_from(head, arguments, request)
            return await submit(head, request, self._cluster.say)

        try:
            return self._cluster.do(submit_request)
        except KeyboardInterrupt:
            raise InterruptedRunError("interrupted: what is copied stays there; the same command goes on") from None

    def follow(
        self, arguments: EvalArguments, submitted: SubmittedEval | None, show: Callable[[Path], None]
    ) -> Finished | None:
        """See `Evaluator.follow`."""
        assert submitted is not None
        selection, say = self._cluster.selection, self._cluster.say
        copies = self.copy_of(arguments.output_path)
        if arguments.watch:
            self._cluster.wait(follow_watch(selection, submitted, copies, say, show))
            return None
        finished = self._cluster.wait(follow(selection, submitted, copies, say))
        if self._source is not None:
            with file_failures(self._source, FILEROOT):
                keep_scores({**finished.results, "model_path": str(self._source)}, finished.folder)
        return finished

    def results(self, output_path: str) -> Path:
        """See `Evaluator.results`: they are copied to this machine."""

        async def fetch(head: Head) -> Path:
            folder = output_folder(head, output_path)
            return await copy_results(head, folder, await newest_results(head, folder), self.copy_of(output_path))

        return find_results(str(self._cluster.do(fetch)))

    def stop(self, output_path: str, user: str) -> str:
        """See `Evaluator.stop`."""
        say = self._cluster.say
        return self._cluster.do(lambda head: stop(head, output_folder(head, output_path, user), say, user))

    def copy_of(self, output_path: str) -> Path:
        """Where results are copied to: beside those of this machine, by the cluster's name."""
        typed = PurePosixPath(output_path)
        return Path(typed.name if typed.is_absolute() else typed).absolute() / self._cluster.cluster.name
