"""Options that several commands have as a group: which hosts they mean, and how to log in to them."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from dataclasses import fields
from typing import Annotated, Any

import typer

from clusterkit.ssh.host_options import HostOptions

_SPELLINGS = {"--train-param": "--preset", "--private-key-files": "--private-key-file"}
_SEVERAL = {"--hostnames", "--limit", "--exclude"}
"""Options after which several words may stand, as argparse's nargs='+' allows."""
_VERBATIM = {"--flags", "--server-flag", "--sbatch-option"}
"""Options whose value is options of another program, spelled as that wants them."""


_OPTIONS: dict[str, Any] = {
    "hostnames": typer.Option(
        metavar="HOST...", help="Hosts: a b c, a,b,c, node[01-16], user@host:port or ssh aliases."
    ),
    "cluster": typer.Option(
        metavar="NAME", help="Name that the hosts are kept under [the current cluster; of --hostnames: default]."
    ),
    "private_key_file": typer.Option(
        metavar="FILE", help="Private key of any type; those of ~/.ssh and the agent need no naming."
    ),
    "ssh_port": typer.Option(metavar="PORT", help="SSH port."),
    "username": typer.Option(metavar="USER", help="User to log in as."),
    "bastion": typer.Option(metavar="[USER@]HOST[:PORT]", help="Log in through this host; several with commas."),
    "host_key_policy": typer.Option(
        metavar="accept-new|strict", help="accept-new: trust a host's first key. strict: known hosts only."
    ),
    "ask_password": typer.Option("--ask-password", help="Ask for the password to log in with."),
    "ask_sudo_password": typer.Option("--ask-sudo-password", help="Ask for sudo's password, should a host want one."),
    "connect_timeout": typer.Option(metavar="SECONDS", help="Give up on a host that answers nothing for as long."),
    "head": typer.Option(metavar="HOST", help="Head node; the first host else."),
    "storage": typer.Option(metavar="FOLDER", help="Folder that all share [/storage]."),
    "limit": typer.Option(metavar="PATTERN...", help="Only these hosts: names, node[01-04], gpu-*."),
    "exclude": typer.Option(metavar="PATTERN...", help="Not these hosts."),
}
"""How each field of `HostOptions` is typed."""


def takes_hosts(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a Typer command all fields of `HostOptions` as options; it gets them as its parameter `hosts`."""
    return takes(command, "hosts", HostOptions, _OPTIONS)


def takes(command: Callable[..., Any], parameter: str, cls: Any, options: dict[str, Any]) -> Callable[..., Any]:
    """Give a Typer command fields of a dataclass as options; it gets them as one parameter.

    Args:
        options: Typer's option of every field that is to be typed; the others keep their defaults.
    """
    signature = inspect.signature(command, eval_str=True)
    own = [one for one in signature.parameters.values() if one.name != parameter]
    hints = inspect.get_annotations(cls, eval_str=True)
    shared = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=field.default,
            annotation=Annotated[hints[field.name], options[field.name]],
        )
        for field in fields(cls)
        if field.name in options
    ]
    positional = [one for one in own if one.kind is not inspect.Parameter.KEYWORD_ONLY]
    keyword = [one for one in own if one.kind is inspect.Parameter.KEYWORD_ONLY]

    @functools.wraps(command)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        kwargs[parameter] = cls(**{one.name: kwargs.pop(one.name) for one in shared})
        return command(*args, **kwargs)

    wrapper.__signature__ = signature.replace(parameters=[*positional, *shared, *keyword])  # type: ignore[attr-defined]
    wrapper.__annotations__ = {one.name: one.annotation for one in [*own, *shared]}
    return wrapper


def expand_arguments(argv: list[str]) -> list[str]:
    """Rewrite what other tools' users type into what Typer understands.

    `--hostnames a b c` becomes `--hostnames a --hostnames b --hostnames c`; `--private_key_file` becomes
    `--private-key-file` and `--train_param` `--preset`. KEY=VALUE is no host; words after `--` stay as they are.
    """
    words: list[str] = []
    several = ""
    for index, word in enumerate(argv):
        if word == "--":
            return words + argv[index:]
        if re.fullmatch(r"--?[A-Za-z][^\s=]*(=.*)?", word, re.DOTALL) and not _is_value(words, several):
            name, equals, value = word.partition("=")
            name = name.replace("_", "-")
            name = _SPELLINGS.get(name, name)
            several = name if name in _SEVERAL and not equals else ""
            words.append(name + equals + value)
        elif several and words[-1] != several and "=" not in word:
            words += [several, word]
        else:
            words.append(word)
    return words


def _is_value(words: list[str], several: str) -> bool:
    """The word after `--hostnames` is its value whatever it looks like (a host name with a '-' is then refused); so is
    that after `--server-flag`.
    """
    last = words[-1] if words else ""
    return last in _VERBATIM or (last != "" and last == several)
