"""Whether the next generation can be formed now, and by whom: pure functions over a mirror of a run's `rdzv/` keys."""

import time
from collections.abc import Mapping
from dataclasses import dataclass

from .rounds import Member, Seat, View, assign_ranks

LATER_LAST_CALL_S = 1.0
"""How long a later round stays open for more than the minimum of hosts; the first round waits for `last_call_s`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """The members of the round to form by group rank, or None and when to look again if nothing changes; and why."""

    members: tuple[Seat, ...] | None
    reason: str
    wait_s: float | None = None


def next_round(
    view: View,
    *,
    generation: int,
    min_nodes: int,
    max_nodes: int,
    since_arrival_s: float,
    last_call_s: float,
    now_unix_s: float,
) -> Decision:
    """Decide whether generation `generation` can be formed now.

    Every live member of the round before must be ready, so that it never loses its rank to a host that was quicker.
    Then `max_nodes` hosts form the round at once, and fewer, at least `min_nodes`, after the last call. Hosts in
    quarantine take part only as far as the others are fewer than `min_nodes` or than the round before: what is in
    memory fits no other number of ranks.

    Args:
        view: The run's keys.
        generation: Number of the round to form.
        min_nodes: Smallest size.
        max_nodes: Largest size; hosts beyond it stay standbys.
        since_arrival_s: Seconds since a host last became ready.
        last_call_s: Last call of a first round, seconds; later ones use at most `LATER_LAST_CALL_S`.
        now_unix_s: The time, which says which quarantines are over.
    """
    before = view.round.members if view.round else ()
    ready = {host: member for host, member in view.members.items() if member.ready == generation}
    awaited = sorted(seat.host for seat in before if seat.host in view.members and seat.host not in ready)
    gone = sorted(seat.host for seat in before if seat.host not in view.members)
    missing = f"; lost: {', '.join(gone)}" if gone else ""
    if awaited:
        return Decision(members=None, reason=f"waiting for {', '.join(awaited)} to stop its workers{missing}")
    ready, avoided = _usable(view, ready, max(min_nodes, min(len(before), max_nodes)), now_unix_s)
    missing += f"; in quarantine: {', '.join(avoided)}" if avoided else ""
    if len(ready) < min_nodes:
        return Decision(members=None, reason=f"{len(ready)} of at least {min_nodes} hosts are ready{missing}")
    ranked = assign_ranks(before, ready, max_nodes)
    if len(ready) >= max_nodes:
        return Decision(members=ranked, reason=f"{max_nodes} hosts are ready")
    if before and (
        not gone or any(seat.session == view.members[seat.host].session for seat in before if seat.host in ready)
    ):
        last_call_s = min(last_call_s, LATER_LAST_CALL_S)
    if since_arrival_s < last_call_s:
        reason = f"{len(ready)} hosts are ready; last call for up to {max_nodes}{missing}"
        return Decision(members=None, reason=reason, wait_s=last_call_s - since_arrival_s)
    return Decision(members=ranked, reason=f"{len(ready)} hosts are ready and the last call is over{missing}")


def _usable(
    view: View, ready: Mapping[str, Member], needed: int, now_unix_s: float
) -> tuple[dict[str, Member], list[str]]:
    """Return who of the ready hosts may be in a round of `needed`, and who is left out because of a quarantine."""
    usable = {host: member for host, member in ready.items() if view.quarantine_of(host, now_unix_s) is None}
    before = {seat.host for seat in view.round.members} if view.round else set()
    # A host that was in the round before holds its state; beyond that, whoever was put into quarantine first.
    avoided = sorted(
        (host for host in ready if host not in usable),
        key=lambda host: (host not in before, view.quarantines[host].since_unix_s, host),
    )
    missing = max(0, needed - len(usable))
    return usable | {host: ready[host] for host in avoided[:missing]}, avoided[missing:]


class Arrivals:
    """When a host last became ready, as this launcher saw it."""

    def __init__(self) -> None:
        self._ready: frozenset[str] = frozenset()
        self._last_s = time.monotonic()

    def since_last_s(self, view: View, generation: int) -> float:
        """Return the seconds since a host last became ready for `generation`."""
        ready = frozenset(member.session for member in view.members.values() if member.ready == generation)
        if ready - self._ready:
            self._last_s = time.monotonic()
        self._ready = ready
        return time.monotonic() - self._last_s


__all__ = ["LATER_LAST_CALL_S", "Arrivals", "Decision", "next_round"]
