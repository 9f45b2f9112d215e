"""What the root does about what it sees: a pure function from a view of the run to actions and their reasons.

Gemini, Section 6.6. The recovery plan itself is the next round, which launchers form by themselves: members with
stable group ranks and the watermark. The root adds what no single launcher can know: who must not be in that round,
that memory no longer holds what it would restore, that a generation hangs, that restarting is of no use.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

from resilient_run.ckpt.format.pair import Pair

from ..base.policy import RootPolicy
from ..run.commit import unhealthy_row
from ..run.observation import Observation
from ..run.quarantine import Quarantine
from ..run.records import Failure
from .requests import Request
from .view import RootView

HEALTH_KINDS = frozenset({"memory", "disk", "tmpfs", "load", "gpu", "straggler"})
"""Observations that say, with severity "fail", that a host cannot go on training."""

_SOFTWARE = frozenset({"worker_exit", "hang", "restart"})
_HARDWARE = frozenset({"host_lost", "unhealthy"})
_BLAMED = frozenset({"worker_exit", "hang", "host_lost", "unhealthy", "corruption"})
_LOOPING = frozenset({"worker_exit", "hang", "corruption", "unhealthy_steps"})
_FEW_STEPS = 10
"""How much further than the last time a script may have got that fails in the same way for the same reason."""
_ABSENT_S = 10.0
"""How long a launcher may be away before it is replaced, unless others found it lost: etcd may have been away."""
_LEAVING_S = 60.0
"""How long a host that is given back is avoided: it must not get a seat while the operator takes it away."""
_KEPT_REQUESTS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Note:
    """Remember a failure; `fault` is "software", "hardware" or "planned" (Gemini, 6.6.1)."""

    failure: Failure
    fault: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PutInQuarantine:
    """Make launchers avoid `host`."""

    host: str
    quarantine: Quarantine
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Ask:
    """Ask the operator for a host in the place of each of `hosts`; "" is another standby."""

    hosts: tuple[str, ...]
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Answered:
    """Remember that `host` is what came for `request`."""

    request: Request
    host: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Release:
    """Give `host` back to the operator, who was asked for one with `request`, and avoid it until it is gone."""

    request: Request
    host: str
    quarantine: Quarantine
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class FallBack:
    """Make the watermark `pair`, which the persistent tier holds (Gemini, 6.6.2, case 2)."""

    pair: Pair
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Break:
    """Break the current generation for everyone, so that the next one is formed."""

    kind: str
    host: str
    rank: int | None
    reason: str
    step: int | None = None
    unhealthy: tuple[Pair, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Overlook:
    """Let a hang be that looks like one which a restart did not cure: it is probably long work, and no hang."""

    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Stop:
    """End the run as failed."""

    reason: str


Action = Note | PutInQuarantine | Ask | Answered | Release | FallBack | Break | Overlook | Stop


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """What to do now, all of it or nothing, and why; without actions, why there is nothing to do."""

    actions: tuple[Action, ...]
    reason: str


def decide(view: RootView, policy: RootPolicy, now_unix_s: float, *, corruption: str = "warn") -> Decision:
    """Decide what the root does about `view` at `now_unix_s` by its own clock, and about corruption as configured.

    The same view gives the same decision, and the view that follows from carrying it out gives none.
    """
    round_ = view.round
    if view.closed or round_ is None:
        return Decision(actions=(), reason="the run is over" if view.closed else "no generation has begun")
    notes = _notes(view, now_unix_s)
    view = view.with_noted(note.failure for note in notes)
    if (stop := _crash_loop(view, policy)) is not None:
        return _decision((*notes, stop))
    corrupted = _corruption(view)
    if corrupted is not None and corruption == "stop":
        return _decision((*notes, Stop(reason=corrupted.reason)))
    quarantines = _quarantines(view, policy, now_unix_s)
    added = {action.host: action.quarantine for action in quarantines}
    view = replace(view, quarantines={**view.quarantines, **added})
    avoided = view.quarantined(now_unix_s)
    spare = sorted(
        host
        for host, ready in view.members.items()
        if host not in round_ and host not in avoided and ready == view.generation + 1
    )
    actions: list[Action] = [*notes, *quarantines]
    fall_back = _memory_lost(view)
    if fall_back is not None:
        actions.append(fall_back)
    if view.failure is None:
        if fall_back is not None:
            actions.append(Break(kind="memory_lost", host="", rank=None, reason=fall_back.reason))
        else:
            found = corrupted or _unhealthy_steps(view, policy) or _unhealthy(view, spare) or _hang(view)
            actions += [] if found is None else [found]
    answers = _answers(view)
    actions += answers
    view = replace(view, requests=remembered(view, answers, now_unix_s))
    if (request := _replacement(view, avoided, spare)) is not None:
        actions.append(request)
    elif (standbys := _standbys(view, policy, now_unix_s)) is not None:
        actions.append(standbys)
    elif (release := _surplus(view, policy, avoided, spare, now_unix_s)) is not None:
        actions.append(release)
    if actions:
        return _decision(tuple(actions))
    state = f"broken: {view.failure.message}" if view.failure else f"whole on {len(round_.hosts)} host(s)"
    return Decision(actions=(), reason=f"generation {view.generation} is {state}")


def _decision(actions: tuple[Action, ...]) -> Decision:
    return Decision(actions=actions, reason="; ".join(dict.fromkeys(action.reason for action in actions)))


def _notes(view: RootView, now_unix_s: float) -> list[Note]:
    """Return the failures that are not in the history yet, or not as they are seen now, each with what kind it is."""
    noted = {failure.generation: failure for failure in view.history}
    notes = []
    for generation in sorted(view.failures):
        failure = view.failures[generation].explained(view.gone.get(generation, ()))
        known = noted.get(generation)
        if known is not None:
            if generation not in view.gone or (known.kind, known.host) == (failure.kind, failure.host):
                continue
            failure = replace(failure, began_step=known.began_step, unix_s=known.unix_s)
        else:
            failure = replace(failure, unix_s=now_unix_s)
            if view.round is not None and generation == view.generation:
                failure = replace(failure, began_step=view.round.began_step)
        fault, plan = _classify(view, failure)
        cause = failure.message or f"generation {generation} broke ({failure.kind})"
        notes.append(Note(failure=failure, fault=fault, reason=f"{cause}; {plan}"))
    return notes


def _classify(view: RootView, failure: Failure) -> tuple[str, str]:
    """Return whose fault `failure` is, and from where training will be restored (Gemini, 6.6.2)."""
    where = "the beginning" if view.watermark is None else f"step {view.watermark[1]}"
    if failure.kind == "corruption":
        return "hardware failure", f"all hosts go back to {where}, on which all ranks agreed"
    if failure.kind == "unhealthy_steps":
        return "software failure", f"all hosts go back to {where}"
    if failure.kind in _SOFTWARE:
        return "software failure", f"the same hosts go on at {where} from their own memory"
    if failure.kind not in _HARDWARE:
        return "planned", f"training goes on at {where}"
    if view.watermark is None:
        return "hardware failure", "nothing is committed yet, training starts over"
    live = view.daemons & frozenset(view.members) - {failure.host}
    if unheld := view.unheld(live):
        return "hardware failure", f"no live host has reported a replica of rank {unheld[0]} at {where} yet"
    return "hardware failure", f"peers hold {where} of every rank"


def _crash_loop(view: RootView, policy: RootPolicy) -> Stop | None:
    """Return the end of a run whose last failure was the same one about the same step once too often.

    It is seen when the next round begins where the one before it began to fail: only then is it certain how far
    the last attempt got. A worker that ends by itself may get a few steps further each time.
    """
    assert view.round is not None
    reached = first = view.round.began_step
    began = {failure.generation: failure.began_step for failure in view.history} | {view.generation: reached}
    last = next((failure for failure in view.history if failure.generation == view.generation - 1), None)
    if last is None or last.kind not in _LOOPING:
        return None
    few = _FEW_STEPS if 0 < (last.exitcode or 0) < 128 else 0  # a shell tells of a signal by 128 and its number
    count = 0
    for failure in reversed(view.history):
        ended = began.get(failure.generation + 1)
        if failure.error != last.error or ended is None:
            continue
        if not first - few <= ended <= first:
            break
        first = ended
        count += 1
    if count < policy.crash_loop_failures:
        return None
    where = f"step {first}" if first == reached else f"steps {first} to {reached}"
    # Started again, a run skips the steps that were unhealthy.
    hint = "" if last.kind == "unhealthy_steps" else ", so a restart does not help"
    return Stop(
        reason=f"training failed {count} times at {where} in the same way{hint}; the last time: "
        f"{last.message or last.kind}"
    )


def _quarantines(view: RootView, policy: RootPolicy, now_unix_s: float) -> list[PutInQuarantine]:
    """Return the hosts that failed too often, or that cannot go on, and are not in quarantine."""
    assert view.round is not None
    if len({*view.round.hosts, *view.members}) == 1 and not (policy.operator_command.strip() or policy.slurm_script):
        return []  # Nobody can take its place.
    avoided, found = view.quarantined(now_unix_s), dict[str, str]()
    for host, observation in view.observed():
        if _disables(observation) and host not in avoided:
            found[host] = f"host {host} is unhealthy: {observation.message}"
    recent = Counter(
        failure.host
        for failure in view.history
        if failure.kind in _BLAMED
        and failure.host not in {"", *avoided}
        and failure.unix_s > now_unix_s - policy.quarantine_window_s
        and (failure.host not in view.quarantines or failure.unix_s > view.quarantines[failure.host].since_unix_s)
    )
    for host, count in recent.items():
        if count >= policy.quarantine_failures and host not in found:
            found[host] = f"host {host} failed {count} times within {policy.quarantine_window_s:g} s"
    return [
        PutInQuarantine(
            host=host,
            quarantine=Quarantine(
                since_unix_s=now_unix_s, until_unix_s=now_unix_s + policy.quarantine_cooldown_s, reason=cause
            ),
            reason=f"{cause}; it is avoided for {policy.quarantine_cooldown_s:g} s",
        )
        for host, cause in sorted(found.items())
    ]


def _memory_lost(view: RootView) -> FallBack | None:
    """Return the step to fall back to when no memory holds what this generation restores (case 2).

    Decided only when every member's daemon is there: one that is cut off may still hold it. What the round restores
    is what is committed only until the generation commits something itself, and then everybody has it.
    """
    assert view.round is not None
    restore = view.round.restore
    if restore is None or view.watermark != restore or not view.persisted or restore in view.persisted:
        return None
    if any(host not in view.daemons or host not in view.held for host in view.round.hosts):
        return None
    unheld = view.unheld(view.daemons)
    if not unheld:
        return None
    pair = max(view.persisted)
    ranks = ", ".join(map(str, unheld))
    return FallBack(
        pair=pair,
        reason=f"no live host holds step {restore[1]} of rank(s) {ranks}: every rank falls back to step {pair[1]} in "
        "the persistent tier",
    )


def _unhealthy(view: RootView, spare: list[str]) -> Break | None:
    """Return the swap of a host that cannot go on for a standby; without a standby training goes on as long as it can.

    It runs as many ranks. Breaking without one would only bring the same host back, which is then used for want of a
    better one.
    """
    assert view.round is not None
    for host, observation in view.observed():
        alike = [other for other in spare if view.nprocs.get(other) == view.nprocs.get(host)]
        if _disables(observation) and host in view.round and alike:
            reason = f"host {host} is unhealthy ({observation.message}): {alike[0]} takes its place"
            return Break(kind="unhealthy", host=host, rank=observation.rank, reason=reason)
    return None


def _corruption(view: RootView) -> Break | None:
    """Return the way back to the newest step on which all ranks agreed: nothing was committed since."""
    assert view.round is not None
    for _, item in view.observed():
        if (item.kind, item.severity, item.generation) == ("corruption", "fail", view.generation):
            host = "" if item.rank is None else view.round.host_of(item.rank) or ""
            return Break(kind="corruption", host=host, rank=item.rank, reason=f"corruption: {item.message}")
    return None


def _unhealthy_steps(view: RootView, policy: RootPolicy) -> Break | None:
    """Return the way back to the newest committed step, which is before those that ranks call unhealthy in a row."""
    assert view.round is not None
    row = unhealthy_row(view.unhealthy, policy.unhealthy_steps)
    if not row:
        return None
    rank, step = view.unhealthy[row[0]].rank, row[0].step
    are = f"step {step} is" if len(row) == 1 else f"steps {step} to {row[-1].step} ({len(row)} in a row) are"
    reason = f"{are} unhealthy, first on rank {rank}"
    return Break(
        kind="unhealthy_steps",
        host=view.round.host_of(rank) or "",
        rank=rank,
        reason=reason,
        step=step,
        unhealthy=row,
    )


def _hang(view: RootView) -> Break | Overlook | None:
    """Return the restart of a generation that makes no progress, with whom it is blamed on if that is one host.

    At the step of an earlier hang it is only noted, once, unless a process is stopped or gone: what takes too long in
    the same place again is most likely no hang, but work that no restart makes shorter.
    """
    hangs = [
        (host, item)
        for host, item in view.observed()
        if (item.kind, item.severity, item.generation) == ("hang", "fail", view.generation)
    ]
    if not hangs:
        return None
    # A rank that hangs makes all the others wait for it: only where one stands out is there somebody to blame.
    blamed = [(host, item) for host, item in hangs if item.rank is not None]
    host, hang = blamed[0] if len(blamed) == 1 else ("", hangs[0][1])
    if hang.step is not None and view.alive.intersection(view.round.hosts if view.round else ()):
        # Whoever reported it has not heard of that yet.
        return None
    same = [
        failure.generation
        for failure in view.history
        if hang.step is not None and (failure.kind, failure.step) == ("hang", hang.step)
    ]
    if same:
        reason = (
            f"generation {view.generation} stands still at step {hang.step} as generation {same[-1]} did: it is not "
            "restarted for this again; raise detect.hang_floor_s, or do what takes so long in Checkpointer.pause()"
        )
        noted = any((entry.get("kind"), entry.get("reason")) == ("overlook", reason) for entry in view.decisions)
        return None if noted else Overlook(reason=reason)
    return Break(
        kind="hang",
        host=host,
        rank=hang.rank if host else None,
        reason=f"generation {view.generation} hangs: {hang.message}",
        step=hang.step,
    )


def _in_need(view: RootView, avoided: set[str]) -> dict[str, bool]:
    """Return the hosts of the round that need another one in their place, and whether each is lost: else avoided."""
    assert view.round is not None
    if not any(host in view.members for host in view.round.hosts):
        # Nobody is left who could go on with a replacement: the run has ended or is being started again.
        return {}
    lost = [
        host
        for host in view.round.hosts
        if view.failure is not None
        and host not in view.members
        and ((view.failure.kind, view.failure.host) == ("host_lost", host) or view.absent_s.get(host, 0.0) > _ABSENT_S)
    ]
    return dict.fromkeys(lost, True) | {
        host: False for host in view.round.hosts if host in avoided and host not in lost
    }


def _replacement(view: RootView, avoided: set[str], spare: list[str]) -> Ask | None:
    """Return the request for as many hosts as are lost or avoided beyond the standbys, each asked for once."""
    need = _in_need(view, avoided)
    wanted = [host for host in list(need)[len(spare) :] if not _asked(view, host, lost=need[host])]
    if not wanted:
        return None
    return Ask(hosts=tuple(wanted), reason=f"no standby is ready for host(s) {', '.join(wanted)}")


def _asked(view: RootView, host: str, *, lost: bool) -> bool:
    since_unix_s = view.quarantines[host].since_unix_s if host in view.quarantines else 0.0
    return any(
        request.host == host and (request.generation == view.generation if lost else request.unix_s >= since_unix_s)
        for request in view.requests
    )


def remembered(view: RootView, actions: Iterable[Action], now_unix_s: float) -> tuple[Request, ...]:
    """Return the requests to the operator as they are once `actions`, decided on `view`, are carried out."""
    requests = list(view.requests)
    for action in actions:
        match action:
            case Ask(hosts=hosts):
                known = tuple(sorted(view.members))
                requests += [
                    Request(host=host, generation=view.generation, unix_s=now_unix_s, known=known) for host in hosts
                ]
            case Answered(request=request, host=host):
                requests[requests.index(request)] = replace(request, answer=host)
            case Release(request=request):
                requests.remove(request)
    return tuple(requests[-_KEPT_REQUESTS:])


def _answers(view: RootView) -> list[Answered]:
    """Return what came for requests: each newcomer answers the oldest one that it can, also one that came too late."""
    came = {request.answer for request in view.requests}
    found = []
    for request in view.requests:
        new = sorted(view.members.keys() - {*request.known, *came})
        if not request.answer and new:
            came.add(new[0])
            what = f"in place of host {request.host}, as requested" if request.host else "as the standby requested"
            found.append(Answered(request=request, host=new[0], reason=f"host {new[0]} came {what}"))
    return found


def shortage(view: RootView, policy: RootPolicy, now_unix_s: float) -> int:
    """Return how many standbys have to be asked for: those that are missing and not on their way, 0 without a target.

    A launcher that is not ready yet is on its way, too. Hosts in need of another one take a standby each.
    """
    if not policy.standbys or view.closed or view.round is None:
        return 0
    avoided = view.quarantined(now_unix_s)
    if not any(host in view.members for host in view.round.hosts):
        return 0
    there = sum(host not in view.round and host not in avoided for host in view.members)
    coming = sum(
        not request.answer and request.unix_s > now_unix_s - policy.standby_timeout_s for request in view.requests
    )
    return max(0, policy.standbys + len(_in_need(view, avoided)) - there - coming)


def _standbys(view: RootView, policy: RootPolicy, now_unix_s: float) -> Ask | None:
    """Return the request for the standbys that are missing, once they have been for a while."""
    missing = shortage(view, policy, now_unix_s)
    if not missing or view.short_s <= _ABSENT_S:
        return None
    return Ask(hosts=("",) * missing, reason=f"{missing} of {policy.standbys} standby(s) missing")


def _surplus(
    view: RootView, policy: RootPolicy, avoided: set[str], spare: list[str], now_unix_s: float
) -> Release | None:
    """Return the standby that is one too many because the operator was asked for a host, and what it replaced is back.

    A host that the operator provided goes before one that it replaced, and that before any other one.
    """
    answered = [request for request in view.requests if request.answer]
    if not (policy.release_command.strip() or policy.slurm_script) or view.failure is not None or not answered:
        return None
    if len(spare) <= policy.standbys + len(_in_need(view, avoided)):
        return None
    provided = [(request, request.answer) for request in reversed(answered) if request.answer in spare]
    mended = [(request, request.host) for request in answered if request.host in spare]
    request, host = (*provided, *mended, (answered[0], spare[-1]))[0]
    reason = f"{len(spare)} standby(s) are ready and {policy.standbys} wanted: host {host} is released"
    quarantine = Quarantine(since_unix_s=now_unix_s, until_unix_s=now_unix_s + _LEAVING_S, reason="it is released")
    return Release(request=request, host=host, quarantine=quarantine, reason=reason)


def _disables(observation: Observation) -> bool:
    return observation.severity == "fail" and observation.kind in HEALTH_KINDS
