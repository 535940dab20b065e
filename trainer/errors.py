"""Errors whose message is meant for the user: what is wrong, and what to do next."""

from __future__ import annotations


class UserError(Exception):
    """Bad usage or configuration. The command prints the message without a traceback and exits with 2."""

    exit_code = 2


class QuestionTooLongError(UserError):
    """A question that is over the agent's limit or the model's context window; others may fit."""


class RunError(UserError):
    """The run failed for a reason outside the configuration (disk full, damaged checkpoint). Exit code 1."""

    exit_code = 1
    no_answer = False
    """Whether what was asked was silent, so that the same command may succeed in a moment."""


class NoAnswerError(RunError):
    """A host or a service does not answer."""

    no_answer = True


class CrashError(RunError):
    """A process of the run died. Nothing has to be changed first: a new start may go on from the recover checkpoint."""


class InterruptedRunError(UserError):
    """SIGINT or SIGTERM: a recover checkpoint has been written where there was something to keep. Exit code 130."""

    exit_code = 130
