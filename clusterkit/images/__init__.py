"""The runtime image: built, pinned, and the same on every host."""

from clusterkit.images.build import build, built
from clusterkit.images.context import Recipe
from clusterkit.images.errors import ImageError
from clusterkit.images.identity import Image, inspect

__all__ = ["Image", "ImageError", "Recipe", "build", "built", "inspect"]
