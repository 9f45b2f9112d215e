"""Whether this process's generation is over: what it computes from then on may be wrong, and is never captured."""

import threading
from typing import Final

stopped: Final = threading.Event()
"""Set before process groups are aborted, where collectives of a GPU then end without a result and without an error."""
