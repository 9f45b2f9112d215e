"""Put something of ours in the place of a name in someone else's module, for a while."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType


@contextmanager
def rebound(module: ModuleType, name: str, original: object, replacement: object) -> Iterator[None]:
    """Bind `name` in `module` to `replacement` while the block runs, unless it is not `original` any more."""
    if getattr(module, name) is not original:
        yield
        return
    setattr(module, name, replacement)
    try:
        yield
    finally:
        setattr(module, name, original)
