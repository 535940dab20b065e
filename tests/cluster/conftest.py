"""Real hosts for the tests of this folder: one testbed for the whole run, bare nodes for every test that asks."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator

import pytest
from cluster_training import base_of
from setup_command import Operator
from testbed import Node, Testbed, TestbedError
from testbed_runtime import build_cpu_image, put_on_storage

from clusterkit.provision.images.identity import Image


@pytest.fixture(scope="session")
def testbed() -> Iterator[Testbed]:
    """Three real nodes with what the last test left on them. Needs root and Linux; installs the rest by itself."""
    with contextlib.ExitStack() as stack:
        try:
            running = stack.enter_context(Testbed.start(nodes=3))
        except TestbedError as error:
            if os.environ.get("CLUSTERKIT_REQUIRE_REAL") == "1":
                pytest.fail(f"{error} (and CLUSTERKIT_REQUIRE_REAL=1 forbids skipping)")
            pytest.skip(str(error))
        yield running


@pytest.fixture
def nodes(testbed: Testbed) -> list[Node]:
    """The nodes as bare hosts: nothing installed, an empty shared storage."""
    testbed.reset()
    return testbed.nodes


@pytest.fixture(scope="session")
def cpu_image(testbed: Testbed) -> Image:
    """The CPU runtime image, built in the testbed's engine; testbed_runtime.py puts it on nodes or on the storage."""
    return build_cpu_image(testbed)


@pytest.fixture(scope="session")
def pair(testbed: Testbed) -> list[Node]:
    """Two bare hosts, for the files that train: one file finds what the other left."""
    testbed.reset()
    return testbed.nodes[:2]


@pytest.fixture(scope="session")
def operator(
    testbed: Testbed, pair: list[Node], cpu_image: Image, tmp_path_factory: pytest.TempPathFactory
) -> Operator:
    """A cluster of two hosts without a preset, whose head has the base that the testbed's Debian is."""
    put_on_storage(testbed, cpu_image)
    operator = Operator(testbed, tmp_path_factory.mktemp("operator"), cpu_image)
    done = operator.setup(hosts=pair)
    assert done.exit_code == 0, done.text
    with testbed.base_archive.open("rb") as base:
        words = testbed.engine.argv("exec", "-i", pair[0].container, "docker", "import", "-", base_of(testbed))
        subprocess.run(words, stdin=base, check=True, capture_output=True, timeout=300)
    return operator
