"""Which formats this version writes: trainers, launchers and daemons that differ leave each other's slots alone."""

from typing import Final

from . import manifest, wire
from .slot import MAGIC

FORMATS: Final = {"wire": str(wire.VERSION), "slot": MAGIC.hex(), "manifest": str(manifest.VERSION)}
"""Fields of `attach` and `open_job`."""
