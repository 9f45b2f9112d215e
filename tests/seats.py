"""Seats of rounds that no launcher has formed, and keys of launchers that nobody has started."""

from collections.abc import Mapping, Sequence
from itertools import repeat
from typing import Any

from resilient_run.ckpt.format.pair import Pair
from resilient_run.daemon.run.commit import Held
from resilient_run.daemon.run.report import complete
from resilient_run.daemon.run.rounds import Round, Seat


def seats(hosts: Sequence[str], nprocs: Sequence[int] = (), labels: Sequence[str] = ()) -> tuple[Seat, ...]:
    """Return the seats of `hosts`, of one rank and without a label where nothing else is said."""
    filled = zip(hosts, nprocs or repeat(1), labels or repeat(""), strict=False)
    return tuple(Seat(host=host, nproc=nproc, label=label) for host, nproc, label in filled)


def member_value(session: str, ready: int = 0) -> dict[str, Any]:
    """Return the value of a launcher's key."""
    return {"session": session, "nproc": 1, "role": "", "addr": "127.0.0.1", "pid": 1, "ready": ready, "label": ""}


def everywhere(round_: Round, replicas: int, held: Mapping[str, Held], spares: str = "") -> frozenset[Pair]:
    """Return the pairs of which no replica is missing, by what hosts hold and beside a round keep of every rank."""
    kept = {host: round_.kept(host, replicas) for host in round_.hosts}
    kept |= {spare: tuple(range(round_.world_size)) for spare in spares}
    return frozenset.intersection(*(complete(round_, ranks, held.get(host, {})) for host, ranks in kept.items()))
