"""What the launcher tells a trainer through its environment (`docs/internals/protocol.md`, "Environment")."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from ..errors import DaemonError


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerEnv:
    """One worker of one generation of a run, and the socket of the daemon on its host.

    Attributes:
        host: Name of this host in the run, "" where it has only one here.
        store: Address and port of the key-value store that the workers of a generation share, if there is one.
    """

    socket: Path
    run_id: str
    generation: int
    rank: int
    local_rank: int
    world_size: int
    host: str = ""
    store: tuple[str, int] | None = None

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Self | None:
        """Return the trainer described by `environ`, or None when resilient-run did not start this process.

        Raises:
            DaemonError: `RESILIENT_SOCKET` is set, but the other variables are missing or are not numbers.
        """
        if "RESILIENT_SOCKET" not in environ:
            return None
        try:
            return cls(
                socket=Path(environ["RESILIENT_SOCKET"]),
                run_id=environ["RESILIENT_RUN_ID"],
                generation=int(environ["RESILIENT_GENERATION"]),
                rank=int(environ["RANK"]),
                local_rank=int(environ["LOCAL_RANK"]),
                world_size=int(environ["WORLD_SIZE"]),
                host=environ.get("RESILIENT_HOST", ""),
                store=(environ["MASTER_ADDR"], int(environ["MASTER_PORT"])) if "MASTER_ADDR" in environ else None,
            )
        except (KeyError, ValueError) as error:
            raise DaemonError(
                f"RESILIENT_SOCKET is set, but the worker environment is incomplete ({error!r}): "
                "start the script with resilient-run, or unset RESILIENT_SOCKET"
            ) from error
