"""The runtime image: built, pinned, and the same on every host."""

from clusterkit.provision.images.build import build, built
from clusterkit.provision.images.context import Recipe
from clusterkit.provision.images.distribute import Distributed, Distribution, How, ImageOutcome, distribute
from clusterkit.provision.images.errors import ImageError
from clusterkit.provision.images.identity import Image, check_reference, inspect
from clusterkit.provision.images.lock import Lock
from clusterkit.provision.images.meter import Progress
from clusterkit.provision.images.pull import resolve

__all__ = [
    "Distributed",
    "Distribution",
    "How",
    "Image",
    "ImageError",
    "ImageOutcome",
    "Lock",
    "Progress",
    "Recipe",
    "build",
    "built",
    "check_reference",
    "distribute",
    "inspect",
    "resolve",
]
