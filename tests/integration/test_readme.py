"""What README tells a newcomer with a laptop to type, after `make demo`."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

from runs import Trial

README = Path(__file__).parents[2] / "README.md"
CLUSTERKIT = str(Path(sys.executable).with_name("clusterkit"))


def test_the_commands_after_the_demo_show_its_run(reference: Trial, tmp_path: Path) -> None:
    text = README.read_text(encoding="utf-8")
    laptop = text[text.index("**A laptop.**") : text.index("**SSH hosts with GPUs.**")]
    commands = re.findall(r"^ {4}(clusterkit .*)$", laptop, re.MULTILINE)
    assert len(commands) >= 2
    (tmp_path / "runs").symlink_to(reference.config.fileroot)

    for command in commands:
        done = subprocess.run(
            [CLUSTERKIT, *shlex.split(command)[1:]], check=False, capture_output=True, text=True, cwd=tmp_path
        )
        assert done.returncode == 0, f"{command}: {done.stderr}"
        assert done.stdout or done.stderr
    assert list(tmp_path.glob("*.html"))
