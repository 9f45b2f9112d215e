"""Which formats this version writes: trainers, launchers and daemons that differ leave each other's slots alone."""

from typing import Final

from .slot import MAGIC
from .wire import VERSION

FORMATS: Final = {"wire": str(VERSION), "slot": MAGIC.hex()}
"""Fields of `attach` and `open_job`."""
