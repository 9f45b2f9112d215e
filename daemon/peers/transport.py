"""What the replicator needs of whatever moves captures between hosts."""

from typing import Protocol

from ..slots.slots import SlotFile


class ReplicaTransport(Protocol):
    """One way in which captures of this host's ranks get to the other hosts that must hold them.

    Its receiving end, on those hosts, holds in their slots only what it has verified.
    """

    @property
    def reach(self) -> object:
        """What `bring` goes by; when it changes, captures that are not committed are brought again at once."""

    def bring(self, host: str, rank: int, file: SlotFile) -> bool:
        """See to it that the capture of `rank` in `file` gets to `host`; False when another transport has to.

        It is asked again, about once a second, until the capture is committed: the answer may change.
        """

    def end(self) -> None:
        """Forget what was being brought and received: the generation is over."""
