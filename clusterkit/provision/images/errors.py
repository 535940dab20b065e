"""How an image cannot be had."""

from __future__ import annotations


class ImageError(Exception):
    """A host has no usable image, or not the same as the others. `message`: what happened; `fix`: what to do next."""

    def __init__(self, host: str, message: str, fix: str = "") -> None:
        super().__init__(f"{host}: {message}" + (f"\n{fix}" if fix else ""))
        self.host, self.message, self.fix = host, message, fix

    @property
    def disk_full(self) -> bool:
        """Whether it is for want of space."""
        return "no space left on device" in self.message.lower()
