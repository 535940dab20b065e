"""What a preset needs is looked for in the image, by the image's own Python, and told with the way on.

No Docker Engine is at hand for a test of this level: a stand-in of `docker` runs the probe with a Python of this
machine, one without packages. What the probe finds there is real.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest
from localsession import LocalSession

from clusterkit.config.resolve import resolve
from clusterkit.provision.images.build import build
from clusterkit.provision.images.context import Recipe
from clusterkit.provision.images.identity import ImageError
from clusterkit.provision.images.needs import ImageNeeds, check_image, needs_of_image, problems_of

TINY = needs_of_image(resolve("tiny", None, []).config)


def engine(folder: Path, script: str) -> LocalSession:
    docker = folder / "docker"
    docker.write_text(f'#!/bin/sh\necho "$*" >>{folder}/asked\n{script}\n')
    docker.chmod(0o755)
    return LocalSession(environment={"PATH": f"{folder}:/usr/bin:/bin"})


def running(python: str) -> str:
    return f'[ "$1" = run ] || exit 9\nwhile [ "$1" != image:1 ]; do shift; done\nshift\nexec {python} "$@"'


def refusal(session: LocalSession, needs: ImageNeeds = TINY) -> ImageError:
    with pytest.raises(ImageError) as caught:
        asyncio.run(check_image(session, "image:1", needs))
    return caught.value


def test_an_image_without_torch_is_told_with_the_way_on(tmp_path: Path) -> None:
    # -S: no site-packages, as an image that has Python and nothing else.
    error = refusal(engine(tmp_path, running(f"{sys.executable} -I -S")))
    assert error.message.startswith("the image image:1 cannot run tiny-recall: it has no ray, ")
    assert "torch, transformers" in error.message
    assert "--image REF" in error.fix
    assert "--image none" in error.fix
    assert "images/" in error.fix
    (asked,) = (line for line in (tmp_path / "asked").read_text().splitlines() if line.startswith("run"))
    assert asked.startswith("run --rm --pull never --network none --entrypoint python3 image:1 -c")


def test_an_image_that_cannot_be_run_says_why(tmp_path: Path) -> None:
    error = refusal(engine(tmp_path, 'echo "exec: python3: executable file not found in $PATH" >&2; exit 127'))
    assert "its python3 cannot be run: exec: python3: executable file not found" in error.message


def test_this_python_has_what_tiny_needs(tmp_path: Path) -> None:
    asyncio.run(check_image(engine(tmp_path, running(sys.executable)), "image:1", TINY))


def test_an_engine_is_wanted_by_the_presets_that_serve_with_it() -> None:
    serving = needs_of_image(resolve("7B_n4", None, []).config)
    assert {"sglang", "torch", "transformers"} <= serving.packages.keys()
    assert "sglang" not in TINY.packages


def test_what_is_too_old_is_named() -> None:
    packages = dict.fromkeys(TINY.packages, "99.0") | {
        "torch": "2.13.0+cpu",
        "transformers": "4.57.1",
        "ray": "2.9.0rc1",
    }
    assert problems_of({"python": [3, 9, 2], "packages": packages}, TINY) == [
        "Python is 3.9.2, and 3.11 is the oldest",
        "ray is 2.9.0rc1, and 2.60 is the oldest",
        "transformers is 4.57.1, and 5.6 is the oldest",
    ]


def test_a_base_that_cannot_be_pulled_names_the_ways_on(tmp_path: Path) -> None:
    said = 'Get "https://registry.example/v2/": dial tcp: lookup registry.example: no such host'
    session = engine(
        tmp_path, f"""[ "$1" = image ] && {{ echo "Error: No such image: $5" >&2; exit 1; }}\necho '{said}'; exit 1"""
    )
    with pytest.raises(ImageError) as caught:
        asyncio.run(build(session, Recipe("cpu", base="corp/base:1")))
    assert "its base corp/base:1 cannot be pulled: Get" in caught.value.message
    assert "no such host" in caught.value.message
    for way in ("--image-base", "--image REF", "--bundle", "--https-proxy"):
        assert way in caught.value.fix
