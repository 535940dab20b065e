"""A registry of images on a node, and the Docker Engine that fills it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from testbed import Node, Testbed
from testbed_images import base_image
from testbed_runtime import load_into

from clusterkit.provision.images.versions import versions

REGISTRY_PORT = 5000


def install_docker(node: Node, *options: str) -> None:
    """Install the distribution's Docker Engine and start it. options: of dockerd."""
    apt = "DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends"
    node.exec(f"{apt} docker.io zstd", timeout=300)
    node.exec(f"dockerd {' '.join(options)} >/var/log/dockerd.log 2>&1 & echo", timeout=30)
    node.exec("for n in $(seq 100); do docker version >/dev/null 2>&1 && exit 0; sleep 0.1; done; exit 1")


@contextlib.contextmanager
def registry(node: Node) -> Iterator[None]:
    """The distribution's image registry on a node."""
    apt = "DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends docker-registry"
    node.exec(f"apt-get update -q && {apt}", timeout=300)
    node.exec(
        "printf 'version: 0.1\\nstorage:\\n  filesystem:\\n    rootdirectory: /var/lib/registry\\n"
        f"http:\\n  addr: :{REGISTRY_PORT}\\n' >/root/registry.yml\n"
        "docker-registry serve /root/registry.yml >/var/log/registry.log 2>&1 & echo $! >/root/registry.pid"
    )
    node.exec(f"for n in $(seq 100); do curl -fs http://127.0.0.1:{REGISTRY_PORT}/v2/ && exit; sleep 0.1; done; exit 1")
    try:
        yield
    finally:
        node.exec("kill $(cat /root/registry.pid); rm -rf /var/lib/registry")


@contextlib.contextmanager
def base_mirror(testbed: Testbed, node: Node) -> Iterator[str]:
    """A mirror of the public registry with the base of the CPU image, made from the testbed's own Debian; its URL."""
    base = base_image(testbed.engine, testbed.base_archive)
    tag = f"127.0.0.1:{REGISTRY_PORT}/library/{versions()['CPU_BASE']}"
    install_docker(node)
    load_into(testbed, base, node)
    with registry(node):
        node.exec(f"docker tag {base} {tag} && docker push -q {tag}", timeout=120)
        yield f"http://{node.address}:{REGISTRY_PORT}"
