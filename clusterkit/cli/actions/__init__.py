"""What the commands do: each module calls the package and prints.

`from clusterkit.cli import actions` costs nothing: a module of it is imported when it is first used (`actions.train`).
So a command's options, and its --help, need nothing of what the command needs.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from clusterkit.cli.actions import (
        alerts,
        ask,
        assets,
        bundle,
        check,
        completion,
        completion_values,
        dashboard,
        data,
        diagnose,
        doctor,
        down,
        eval,
        forget,
        home,
        init,
        jobs,
        logs,
        presets,
        ray_status,
        recover,
        report,
        runs,
        serve,
        serve_judge,
        setup,
        status,
        stop,
        sweep,
        target,
        target_of_run,
        trace,
        train,
        train_from,
        use,
    )

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if find_spec(f"{__name__}.{name}") is None:
            raise AttributeError(f"{__name__} has no {name}")
        return import_module(f"{__name__}.{name}")
