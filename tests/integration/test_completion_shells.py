"""Completion in real shells, on a terminal: what appears on the line after the Tab key."""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from realparts import require
from run_writer import RunWriter

from clusterkit.hosts import inventory
from clusterkit.hosts.model import Cluster, Host

PROGRAMS = str(Path(sys.executable).parent)
SHELLS = {
    "bash": ["bash", "--norc", "-i"],
    "zsh": ["zsh", "-f", "-i"],
    "fish": ["fish", "--no-config", "-i"],
}
BEGIN = {
    "bash": 'set -o emacs; bind "set enable-bracketed-paste off"; source <(clusterkit completion bash); PS1="READY> "',
    "zsh": 'bindkey -e; autoload -U compinit; compinit -u; source <(clusterkit completion zsh); PS1="READY> "',
    "fish": "set -g fish_autosuggestion_enabled 0; clusterkit completion fish | source",
}
LINES = [
    ("clusterkit sta", "clusterkit status "),
    ("clusterkit train --preset memalpha-t", "clusterkit train --preset memalpha-tiny "),
    ("clusterkit train --preset=memalpha-t", "clusterkit train --preset=memalpha-tiny "),
    ("clusterkit train --preset tiny algorithm.kl_co", "clusterkit train --preset tiny algorithm.kl_coef="),
    ("clusterkit train --preset tiny mode=lo", "clusterkit train --preset tiny mode=local "),
    ("clusterkit status --cluster la", "clusterkit status --cluster lab-one "),
    (
        "clusterkit status --experiment tiny-recall --trial se",
        "clusterkit status --experiment tiny-recall --trial seed2 ",
    ),
    ("clusterkit status --wat", "clusterkit status --watch "),
    ("clusterkit report --log a-fi", "clusterkit report --log a-file.log "),
]
SECONDS = 60


class Terminal:
    """An interactive shell on a terminal of its own."""

    def __init__(self, command: list[str], folder: Path) -> None:
        self.process, self.screen = pty.fork()
        if self.process == 0:
            os.chdir(folder)
            environment = {**os.environ, "PATH": f"{PROGRAMS}:{os.environ['PATH']}", "TERM": "xterm", "COLUMNS": "200"}
            os.execvpe(command[0], command, environment)
        self.seen = ""

    def type(self, text: str) -> None:
        """Press keys."""
        self.seen = ""
        os.write(self.screen, text.encode())

    def wait_for(self, *wanted: str) -> None:
        """Read the screen until it shows one of some texts, apart from what moves the cursor."""
        end = time.monotonic() + SECONDS
        while not any(text in self.shown() for text in wanted):
            left = end - time.monotonic()
            if left < 0 or not select.select([self.screen], [], [], left)[0]:
                pytest.fail(f"{wanted[0]!r} did not appear; the screen: {self.shown()!r}")
            chunk = os.read(self.screen, 65536).decode(errors="replace")
            if "\x1b[c" in chunk or "\x1b[0c" in chunk:  # fish asks what kind of terminal this is
                os.write(self.screen, b"\x1b[?62;c")
            if "\x1b[6n" in chunk:
                os.write(self.screen, b"\x1b[1;1R")
            self.seen += chunk

    def shown(self) -> str:
        """What was written since the last keys, without colours."""
        plain = re.sub(r"\x1b(\[[0-9;?>=]*[A-Za-z]|\][^\x07]*\x07|[=>()][0-9A-B]?)", "", self.seen)
        return re.sub(r".\x08", "", plain.replace("\r", ""))

    def close(self) -> None:
        """End the shell."""
        os.kill(self.process, 9)
        os.waitpid(self.process, 0)
        os.close(self.screen)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    place = tmp_path_factory.mktemp("completion")
    patch = pytest.MonkeyPatch()
    patch.setenv("CLUSTERKIT_CONFIG", str(place / "config"))
    inventory.save(Cluster(name="lab-one", hosts=(Host(name="a", address="10.0.0.1"),)))
    RunWriter(place / "runs", trial="seed2").config().attempt()
    (place / "a-file.log").write_text("")
    yield place
    patch.undo()


@pytest.mark.parametrize("shell", SHELLS)
def test_a_shell_completes_presets_settings_clusters_trials_and_files(shell: str, folder: Path) -> None:
    require(shutil.which(shell) is not None, f"there is no {shell} on this machine")
    terminal = Terminal(SHELLS[shell], folder)
    try:
        terminal.type(BEGIN[shell] + "; printf '<%s>\\n' begun\n")
        terminal.wait_for("<begun>\n")
        for typed, completed in LINES:
            # Keys wait until the completion is there: then the line is made an argument of a command that prints it.
            terminal.type(f"{typed}\t\x01printf '<%s>\\n' '\x05'\n")
            # zsh takes the blank after a word back when more is typed.
            terminal.wait_for(f"<{completed}>\n", f"<{completed.rstrip()}>\n")
    finally:
        terminal.close()
