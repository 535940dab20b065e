"""A configuration from its YAML file, with one sentence for whatever is wrong with it."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from trainer.config_choices import refusal_of, setting_of
from trainer.errors import UserError

M = TypeVar("M", bound=BaseModel)


def read_config(path: Path, model: type[M]) -> M:
    """Read and validate a configuration file; an empty one has every default.

    Raises:
        UserError: it cannot be read, is not YAML, or a value is not allowed; every such value is named.
    """
    try:
        return model.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")) or {})
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not text in UTF-8: {error}") from error
    except yaml.YAMLError as error:
        raise UserError(f"{path} is not YAML: {error}") from error
    except ValidationError as error:
        lines = [
            f"  {refusal_of(e, 'this one') or ': '.join((setting_of(e['loc']) or 'configuration', e['msg']))}"
            for e in error.errors()
        ]
        raise UserError(f"{path} is not a valid configuration:\n" + "\n".join(lines)) from error
