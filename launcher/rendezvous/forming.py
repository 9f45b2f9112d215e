"""Whether the next generation can be formed now, and by whom: pure functions over a mirror of a run's `rdzv/` keys."""

import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial

from resilient_run.daemon.run.rounds import Member, Seat, allowed, fitting

from .rounds import View, assign_ranks, newcomers

log = logging.getLogger(__name__)

LATER_LAST_CALL_S = 1.0
"""How long a later round stays open for more than the minimum of hosts; the first round waits for `last_call_s`."""

_REMIND_S = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class FormingDecision:
    """The members of the round to form by group rank, or None and when to look again if nothing changes; and why.

    `notable` is what people must see without asking for it: the run waits though torchrun would not.
    """

    members: tuple[Seat, ...] | None
    reason: str
    wait_s: float | None = None
    notable: bool = False


def standby(view: View, host: str, max_nodes: int, now_unix_s: float) -> FormingDecision | None:
    """Return why `host`, outside of the current round, which is whole, can only stand by; None when it can join."""
    number = view.generation
    is_elastic = view.elastic_s is not None and view.captured_by is not None
    if not is_elastic and newcomers(view, max_nodes, now_unix_s):
        return None
    if is_elastic and view.round is not None and len(view.round.seats) < max_nodes:
        sizes = " if that makes one of --rr-sizes" if view.job is not None and view.job.sizes else ""
        avoided = view.quarantine_of(host, now_unix_s)
        when = "this host's quarantine is over" if avoided else f"it has lasted for {view.elastic_s:g} s"
        reason = f"generation {number} grows once {when}{sizes}: this host waits"
        return FormingDecision(members=None, reason=reason, notable=True)
    if view.round is None or view.bound is None or len(view.round.seats) >= max_nodes:
        reason = f"generation {number} is full: this host waits as a standby"
        return FormingDecision(members=None, reason=reason, notable=True)
    why = f"no number of ranks but {view.bound} can restore what is committed, so generation {number} does not grow"
    return FormingDecision(members=None, reason=f"{why}: this host waits as a standby", notable=True)


def next_round(
    view: View,
    *,
    generation: int,
    min_nodes: int,
    max_nodes: int,
    since_arrival_s: float,
    last_call_s: float,
    now_unix_s: float,
    broken_s: float = 0.0,
) -> FormingDecision:
    """Decide whether generation `generation` can be formed now.

    Every live member of the round before must be ready, so that it never loses its rank to a host that was quicker.
    Then `max_nodes` hosts form the round at once, and fewer, at least `min_nodes`, after the last call. Hosts in
    quarantine take part only as far as the others are fewer than `min_nodes` or than the round before.

    A run that has something to restore goes on with the same number of ranks only: it waits for a host in the place of
    a lost one. With `elastic_s` it waits so long, and then goes on with fewer.

    Args:
        view: The run's keys.
        generation: Number of the round to form.
        min_nodes: Smallest size.
        max_nodes: Largest size; hosts beyond it stay standbys.
        since_arrival_s: Seconds since a host last became ready.
        last_call_s: Last call of a first round, seconds; later ones use at most `LATER_LAST_CALL_S`.
        now_unix_s: The time, which says which quarantines are over.
        broken_s: For how long there has been no whole generation.
    """
    before = view.round.seats if view.round else ()
    ready = {host: member for host, member in view.members.items() if member.ready == generation}
    awaited = sorted(seat.host for seat in before if seat.host in view.members and seat.host not in ready)
    gone = sorted(seat.host for seat in before if seat.host not in view.members)
    missing = f"; lost: {', '.join(gone)}" if gone else ""
    if awaited:
        return FormingDecision(members=None, reason=f"waiting for {', '.join(awaited)} to stop its workers{missing}")
    elastic_s = None if view.captured_by is None else view.elastic_s
    needed = min_nodes if elastic_s is not None else max(min_nodes, min(len(before), max_nodes))
    everybody = ready
    ready, avoided = _usable(view, ready, needed, now_unix_s)
    # Rather with a host that is in quarantine than not at all.
    choices = ready, everybody
    missing += f"; in quarantine: {', '.join(avoided)}" if avoided else ""
    if len(ready) < min_nodes:
        why = f"{len(ready)} of at least {min_nodes} hosts are ready{missing}"
        return FormingDecision(members=None, reason=why, wait_s=_REMIND_S)
    if view.bound is not None:
        same = partial(_same_size, view.bound, before, min_nodes=min_nodes, max_nodes=max_nodes, missing=missing)
        decisions = [same(hosts) for hosts in choices]
        return next((decision for decision in decisions if decision.members is not None), decisions[0])
    if view.job is not None and view.elastic_s is not None:
        found = (allowed(view.job.sizes, before, hosts, max_nodes) for hosts in choices)
        if (fits := next((hosts for hosts in found if len(hosts) >= min_nodes), None)) is None:
            why = f"{_ranks(ready.values())} ranks are ready, and --rr-sizes allows "
            why += f"{', '.join(map(str, view.job.sizes))} on at least {min_nodes} hosts{missing}"
            return FormingDecision(members=None, reason=why, wait_s=_REMIND_S, notable=True)
        ready = fits
    if elastic_s is not None and (ranks := _ranks(ready.values())) < (view.captured_by or 0):
        failure = view.failures.get(view.generation)
        # Who leaves on purpose is not waited for.
        if (failure is None or failure.kind != "membership") and (left_s := elastic_s - broken_s) > 0:
            why = f"{ranks} of {view.captured_by} ranks are ready, and the run goes on with fewer after "
            why += f"{elastic_s:g} s without a host{missing}"
            return FormingDecision(members=None, reason=why, wait_s=left_s, notable=True)
    ranked = assign_ranks(before, ready, max_nodes)
    if len(ready) >= max_nodes:
        return FormingDecision(members=ranked, reason=f"{max_nodes} hosts are ready")
    if before and (
        not gone or any(seat.session == view.members[seat.host].session for seat in before if seat.host in ready)
    ):
        last_call_s = min(last_call_s, LATER_LAST_CALL_S)
    if elastic_s is not None and gone:
        last_call_s = 0.0  # SECONDS of --rr-elastic have been waited; who comes later makes the run grow
    if since_arrival_s < last_call_s:
        reason = f"{len(ready)} hosts are ready; last call for up to {max_nodes}{missing}"
        return FormingDecision(members=None, reason=reason, wait_s=last_call_s - since_arrival_s)
    return FormingDecision(members=ranked, reason=f"{len(ready)} hosts are ready and the last call is over{missing}")


def _same_size(
    bound: int, before: tuple[Seat, ...], ready: Mapping[str, Member], *, min_nodes: int, max_nodes: int, missing: str
) -> FormingDecision:
    """Decide on a round of `bound` ranks."""
    lost = [seat for seat in before if seat.host not in ready]
    ranked = assign_ranks(before, ready, min(len(before) or max_nodes, max_nodes))
    if _ranks(ranked) != bound:
        ranked = assign_ranks(before, fitting(bound, before, ready, max_nodes), max_nodes)
    if _ranks(ranked) == bound and len(ranked) >= min_nodes:
        return FormingDecision(members=ranked, reason=f"{bound} ranks are ready to restore what is committed")
    if len(ready) >= max_nodes and len(lost) <= max(0, len(before) - max_nodes):
        # Whoever may still come changes nothing: the script refuses the state, and says with what it can go on.
        return FormingDecision(members=assign_ranks(before, ready, max_nodes), reason=f"{max_nodes} hosts are ready")
    why = f"{_ranks(ranked)} of {bound} ranks are ready, and no other number can restore what is committed"
    return FormingDecision(members=None, reason=f"{why}: waiting for a host{missing}", wait_s=_REMIND_S, notable=True)


def _ranks(seats: Iterable[Seat]) -> int:
    return sum(seat.nproc for seat in seats)


def _usable(
    view: View, ready: Mapping[str, Member], needed: int, now_unix_s: float
) -> tuple[dict[str, Member], list[str]]:
    """Return who of the ready hosts may be in a round of `needed`, and who is left out because of a quarantine."""
    usable = {host: member for host, member in ready.items() if view.quarantine_of(host, now_unix_s) is None}
    before = {seat.host for seat in view.round.seats} if view.round else set()
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


class Announcer:
    """Logs what a launcher waits for: once, and again every minute, which people see, notable or not.

    Args:
        run_id: The run.
    """

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._said = ""
        self._said_s = 0.0

    def tell(self, decision: FormingDecision, generation: int, left_s: float) -> None:
        """Log `decision` about `generation`, for which this launcher waits another `left_s`, if it is time."""
        now_s = time.monotonic()
        still = decision.reason == self._said
        if still and not (decision.wait_s and now_s - self._said_s >= _REMIND_S):
            return
        self._said, self._said_s = decision.reason, now_s
        seen = decision.notable or still
        level = logging.WARNING if seen else logging.INFO
        until = f" (for another {left_s:.0f} s, join_timeout)" if seen and decision.wait_s else ""
        log.log(level, "run %s, generation %d: %s%s", self._run_id, generation, decision.reason, until)
