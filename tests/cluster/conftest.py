"""Real hosts for the tests of this folder: one testbed for the whole run, bare nodes for every test that asks."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import pytest
from testbed import Node, Testbed, TestbedError
from testbed_runtime import build_cpu_image

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
