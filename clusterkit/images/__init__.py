"""The runtime image: built, pinned, and the same on every host."""

from clusterkit.images.build import build, built
from clusterkit.images.context import Recipe
from clusterkit.images.distribute import Distributed, Distribution, How, Outcome, distribute
from clusterkit.images.errors import ImageError
from clusterkit.images.identity import Image, check_reference, inspect
from clusterkit.images.lock import Lock
from clusterkit.images.meter import Progress
from clusterkit.images.pull import resolve

__all__ = [
    "Distributed",
    "Distribution",
    "How",
    "Image",
    "ImageError",
    "Lock",
    "Outcome",
    "Progress",
    "Recipe",
    "build",
    "built",
    "check_reference",
    "distribute",
    "inspect",
    "resolve",
]
