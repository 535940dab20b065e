"""Classes of the user's own, named `module:Class`: imported, checked for their methods, and instantiated.

Imports nothing heavy, so that the operator can check a class with `python -m trainer.custom` before a run starts,
without importing the user's module itself.
"""

from __future__ import annotations

import importlib
import inspect
import json
import logging
import sys
import traceback
from typing import Any

from trainer.config import RunConfig
from trainer.errors import UserError

NEEDS = {
    "agent.name": ("prepare", "rollout", "longest_conversation"),
    "task.name": ("train", "heldout", "num_heldout"),
    "reward.name": ("score",),
}
"""Methods by the setting that names a class; docs/custom.md says what each does."""
NODE_ONLY = frozenset({"torch", "transformers", "tokenizers", "safetensors", "numpy", "ray", "sglang", "vllm"})
"""Packages that nodes have and the operator's machine need not have."""
UNKNOWN_HERE = 3
"""Exit code for a class whose module imports one of NODE_ONLY where it is not installed."""

log = logging.getLogger("trainer")


def is_custom(name: str) -> bool:
    """Whether a name is `module:Class`, not one of ours."""
    return ":" in name


def load_class(setting: str, name: str, code_dir: str = "") -> type[Any]:
    """Import a class and check that it has the methods that its use needs.

    Args:
        setting: agent.name, task.name or reward.name.
        code_dir: folder to import from, after PYTHONPATH.

    Raises:
        UserError: there is no such module or class, importing it fails, or it lacks a method.
    """
    if code_dir and code_dir not in sys.path:
        sys.path.append(code_dir)
    importlib.invalidate_caches()
    module_name, _, class_name = name.partition(":")
    where = f"{setting}={name}"
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name == error.name or module_name.startswith(f"{error.name}.")):
            looked = f"PYTHONPATH and {code_dir}" if code_dir else "PYTHONPATH"
            raise UserError(
                f"{where}: there is no module {error.name} in {looked}: run the command in the folder that holds "
                f"{module_name.partition('.')[0]}.py, or add that folder to PYTHONPATH"
            ) from error
        raise UserError(
            f"{where}: module {module_name} imports {error.name}, which is not installed: install it, or leave it out"
        ) from error
    except Exception as error:  # whatever a user's module does when it is imported
        raise UserError(
            f"{where}: importing {module_name} fails: {type(error).__name__}: {error} ({_place(error)})"
        ) from error
    found = getattr(module, class_name, None)
    if not inspect.isclass(found):
        own = (value for value in vars(module).values() if inspect.isclass(value) and value.__module__ == module_name)
        names = [cls.__name__ for cls in own]
        named = f"its classes are {', '.join(names)}" if names else "it has no class of its own"
        raise UserError(f"{where}: {module.__file__ or module_name} has no class {class_name}: {named}")
    _check_methods(where, setting, found)
    return found


def make(setting: str, name: str, code_dir: str, *arguments: Any) -> Any:
    """Instantiate a class of the user's own. Raises UserError as `load_class`, or the class refuses the arguments."""
    cls = load_class(setting, name, code_dir)
    try:
        return cls(*arguments)
    except UserError:
        raise
    except Exception as error:
        log.error("%s=%s\n%s", setting, name, traceback.format_exc())
        raise UserError(
            f"{setting}={name} cannot be made: {type(error).__name__}: {error} ({_place(error)}); look at "
            f"{setting.partition('.')[0]}.options"
        ) from error


def _check_methods(where: str, setting: str, cls: type[Any]) -> None:
    missing = [method for method in NEEDS[setting] if not callable(getattr(cls, method, None))]
    missing += [method for method in getattr(cls, "__abstractmethods__", ()) if method not in missing]
    if missing:
        noun = {"agent.name": "an agent", "task.name": "a task", "reward.name": "a reward"}[setting]
        raise UserError(
            f"{where}: class {cls.__name__} has no {' and no '.join(missing)}: {noun} needs "
            f"{', '.join(NEEDS[setting])} (docs/custom.md)"
        )
    if setting == "agent.name" and not inspect.iscoroutinefunction(cls.rollout):
        raise UserError(f"{where}: rollout of {cls.__name__} is no coroutine: write it as `async def rollout`")


def _place(error: BaseException) -> str:
    """File and line that an exception came from."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}, line {error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].filename}, line {frames[-1].lineno}" if frames else "no line is known"


def check(config: RunConfig) -> None:
    """Check that every class of the user's own can be imported and has its methods. Raises UserError."""
    for setting, name in config.custom.items():
        load_class(setting, name, config.code_dir)


def main(arguments: list[str]) -> int:
    """`python -m trainer.custom CODE_DIR SETTING=module:Class …`: exits with 0, 2 and a message, or UNKNOWN_HERE."""
    code_dir, *named = arguments
    for text in named:
        setting, _, name = text.partition("=")
        try:
            load_class(setting, name, code_dir)
        except UserError as error:
            cause = error.__cause__
            if isinstance(cause, ModuleNotFoundError) and (cause.name or "").partition(".")[0] in NODE_ONLY:
                return UNKNOWN_HERE
            print(json.dumps({"error": str(error)}), flush=True)
            return UserError.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
