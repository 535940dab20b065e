"""The CPU image for the nodes: built once for real by the testbed's engine, kept, and put where a test wants it."""

from __future__ import annotations

import asyncio
import shutil
import subprocess

from localsession import LocalSession
from testbed import Node, Testbed, TestbedError
from testbed_images import base_image

from clusterkit.provision.images import archive as archives
from clusterkit.provision.images.build import build
from clusterkit.provision.images.context import Recipe
from clusterkit.provision.images.identity import Image


def engine_session(testbed: Testbed) -> LocalSession:
    """A session whose Docker is the testbed's engine."""
    return LocalSession("testbed", environment={"DOCKER_HOST": f"unix://{testbed.engine.socket}"})


def recipe(testbed: Testbed) -> Recipe:
    """The CPU image on the testbed's own Debian, without torch: Ray and the node side, small enough for tests."""
    return Recipe("cpu", base=base_image(testbed.engine, testbed.base_archive), torch=False)


def build_cpu_image(testbed: Testbed) -> Image:
    """Build it, or find it built: nothing but its content decides."""
    wanted, site = recipe(testbed), testbed.site
    image = asyncio.run(
        build(
            engine_session(testbed),
            wanted,
            ca_bundle=site.ca_bundle.read_bytes() if site.ca_bundle else b"",
            apt_mirror=site.apt_mirror,
            pip_index_url=site.pip_index_url,
            pip_find_links=site.pip_find_links if "://" in site.pip_find_links else "",
            proxies=site.proxies,
        )
    )
    listed = testbed.engine.docker(
        "image", "ls", "--format", "{{.Repository}}:{{.Tag}}", wanted.reference.split(":")[0]
    )
    if outdated := [name for name in listed.split() if name != image.reference]:
        testbed.engine.docker("image", "rm", *outdated, check=False)
    return image


def put_on_storage(testbed: Testbed, image: Image) -> None:
    """Put its archive on the shared storage, as an earlier set-up leaves it: `setup --image REFERENCE` loads it."""
    kept = testbed.cache / "archives"
    session = engine_session(testbed)
    found = [one for one in asyncio.run(archives.archives(session, str(kept))) if one.holds(image)]
    if not found:
        shutil.rmtree(kept, ignore_errors=True)
        asyncio.run(archives.write(session, image, str(kept), timeout=300))
    shutil.copytree(kept, testbed.storage / "images", dirs_exist_ok=True)


def load_into(testbed: Testbed, reference: str, *nodes: Node) -> None:
    """Load an image of the testbed's engine into nodes whose Docker runs."""
    for node in nodes:
        saving = subprocess.Popen(testbed.engine.argv("save", reference), stdout=subprocess.PIPE)
        words = testbed.engine.argv("exec", "-i", node.container, "docker", "load", "-q")
        done = subprocess.run(words, stdin=saving.stdout, capture_output=True, text=True, timeout=300, check=False)
        if saving.wait(60) or done.returncode:
            raise TestbedError(f"{node.name} did not take {reference}: {done.stderr}")
