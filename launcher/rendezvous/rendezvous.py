"""The `etcd-v3` rendezvous: stable group ranks, a fresh store for every generation, failures known to all at once."""

import atexit
import logging
import os
import sys
import threading
import time
from concurrent.futures import Future
from dataclasses import replace
from datetime import timedelta
from typing import Any

from torch.distributed import DistNetworkError, DistStoreError, PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from resilient_run.daemon.etcd.address import is_local, is_loopback, own_address
from resilient_run.daemon.etcd.client import EtcdConfig, EtcdError
from resilient_run.daemon.etcd.stranger import is_open
from resilient_run.daemon.run.quarantine import Quarantine
from resilient_run.daemon.run.records import Closed, Failure
from resilient_run.daemon.run.rounds import Member, Round, Seat

from .agreement import Terms
from .claim import HostClaim, machine_name
from .forming import Announcer, Arrivals, FormingDecision, next_round, standby
from .membership import new_session
from .patience import Deadline, Patience
from .rounds import View, broken, newcomers
from .run_link import RunLink

log = logging.getLogger(__name__)

_CLOSE_S = 5.0
_CONNECT_S = 2.0
_POLL_S = 0.1
_REPORT_S = 1.0
_STORE_TIMEOUT = timedelta(seconds=300)


_entered: set["EtcdRendezvous"] = set()


@atexit.register
def leave_all() -> None:
    """Leave the runs that are still entered, which tells the others at once: torch does not where a signal ends it."""
    for rendezvous in list(_entered):
        rendezvous.leave()


class RendezvousOptionError(RendezvousError, ValueError):
    """What this launcher was told about the rendezvous cannot be used."""


class EtcdRendezvous(RendezvousHandler):
    """torch's rendezvous interface on etcd v3, and what our own agent needs beyond it.

    etcd is watched from a background thread; questions are answered from that mirror, without a request.

    Attributes:
        host: Stable name of this host.
        addr: Address at which other hosts reach this one.
        etcd_config: Where etcd is.
        generation: The generation joined last, 0 before the first.
        round: The round joined last.
        stood_by: Whether this host waited for the generation joined last as a standby.
        broke: Why the generation before that one broke, as this host saw it while it waited; None if it did not.

    Raises:
        RendezvousConnectionError: etcd cannot be reached or refuses the credentials.
        RendezvousOptionError: `--rdzv-endpoint`, `--rdzv-id`, an option in `--rdzv-conf` or RESILIENT_HOST_ID is not
            usable.
    """

    def __init__(self, params: RendezvousParameters) -> None:
        self._run_id = params.run_id
        self._min_nodes, self._max_nodes = params.min_nodes, params.max_nodes
        try:
            machine = machine_name(self._run_id)
            self._patience = Patience.from_params(params)
            self.etcd_config = EtcdConfig.parse(params.endpoint, params.config)
        except ValueError as error:
            raise RendezvousOptionError(str(error)) from error
        self._session = new_session()
        self.describe(1, "default")
        self.stood_by = False
        self.broke: Failure | None = None
        self._avoided: Quarantine | None = None
        self._registered = False
        self._offered = 0
        self.generation = 0
        self.round: Round | None = None
        self._store: TCPStore | None = None
        self._joined_s = 0.0
        member = Member(
            host=machine,
            session=self._session,
            nproc=1,
            role="",
            addr="",
            pid=os.getpid(),
            ready=0,
            label=os.environ.get("RESILIENT_LABEL", ""),
        )
        try:
            self._link = RunLink(self.etcd_config, run_id=self._run_id, member=member)
        except EtcdError as error:
            raise RendezvousConnectionError(str(error)) from error
        # Only now: a name service that is away keeps this waiting for longer than whoever typed a wrong name likes.
        self.addr = params.local_addr or own_address(self.etcd_config.endpoints[0])
        self._claim = HostClaim(self._run_id, machine, self._link.membership.view.round)
        self.host = self._claim.host
        _entered.add(self)

    # What torch's agent asks for.

    def get_backend(self) -> str:
        """Return "etcd-v3"."""
        return "etcd-v3"

    def get_run_id(self) -> str:
        """Return the run id."""
        return self._run_id

    @property
    def use_agent_store(self) -> bool:
        """True: workers are clients of the generation's store, which the launcher of group rank 0 serves."""
        return True

    def is_closed(self) -> bool:
        """Tell whether the run is over."""
        return self.closed is not None

    def num_nodes_waiting(self) -> int:
        """Return more than 0 when the workers must stop for another rendezvous: it broke, was closed, or can grow."""
        if self.generation == 0:
            return 0
        if self.closed is not None or self.failure is not None:
            return 1
        return len(self._joining())

    def next_rendezvous(self) -> RendezvousInfo:
        """Return this host's place in the next generation; wait as a standby while the generation is full.

        A generation that this host leaves is broken for all its members.

        Raises:
            RendezvousTimeoutError: Too few hosts came within `join_timeout`. Time as a standby does not count.
            RendezvousClosedError: The run ended with a failure.
            RendezvousGracefulExitError: The run succeeded without this host.
            RendezvousStateError: Another launcher has this host id, or the run goes on with other terms.
            RendezvousConnectionError: etcd refuses, or was away for `join_timeout`.
        """
        try:
            return self._join(Deadline(self._patience.join_timeout_s))
        except EtcdError as error:
            raise RendezvousConnectionError(str(error)) from error

    def set_closed(self) -> None:
        """End the run for everyone, as a success."""
        self.close(f"closed by the launcher on host {self.host}", failed=False)

    def shutdown(self) -> bool:
        """End the run for everyone if this host is part of it, leave, and tell whether etcd knows."""
        if self.generation and not self._link.left and self._rank_in(self._link.membership.view.round) is not None:
            # torch calls this in a `finally`: an exception under way tells a failed run from one that succeeded.
            error = sys.exc_info()[1]
            how = "ended" if error is None else f"failed with {type(error).__name__}"
            self.close(f"the launcher on host {self.host} {how}", failed=error is not None)
        return self.leave()

    # What our agent needs beyond that.

    def describe(self, nproc: int, role: str, **terms: Any) -> None:
        """Set what this host runs, and what more it asks of the run (`Terms`); call it before the first rendezvous."""
        self._nproc, self._role = nproc, role
        self._terms = Terms(min_nodes=self._min_nodes, max_nodes=self._max_nodes, **terms)

    @property
    def failure(self) -> Failure | None:
        """Why the generation joined last is broken, None while it is whole."""
        return broken(self._link.membership.view, self.generation) if self.generation else None

    @property
    def closed(self) -> Closed | None:
        """The end of the run, None while it goes on."""
        return self._link.membership.closed

    @property
    def ended(self) -> Closed | None:
        """The end of the run as etcd has it, which may be that of another launcher; None while nobody knows."""
        return self._link.membership.ended

    @property
    def forgotten(self) -> bool:
        """Whether the run ended and its keys are gone: no generation follows, so nothing recovers."""
        return self.closed is not None and self.view.round is None

    @property
    def view(self) -> View:
        """The newest state of the run."""
        return self._link.membership.view

    @property
    def missed_after_s(self) -> float:
        """For how long a host that is lost still seems to be there, at most."""
        return self._patience.missed_after_s

    @property
    def changed_fd(self) -> int:
        """A descriptor that is readable after any change of what this object knows, until `clear_changed`."""
        return self._link.changed_fd

    @property
    def stays_here(self) -> bool:
        """Tell whether this machine is the only one that can take part in the run."""
        return self._max_nodes == 1 or all(map(is_local, self.etcd_config.endpoints))

    @property
    def is_open(self) -> bool:
        """Tell whether whoever reaches its etcd can read the run's keys."""
        return is_open(self.etcd_config)

    def clear_changed(self) -> None:
        """Make `changed_fd` unreadable until the next change."""
        self._link.clear_changed()

    def report_failure(self, *, kind: str, message: str, **worker: Any) -> None:
        """Break the current generation for all hosts unless someone was first; goes on trying while etcd is away.

        Args:
            kind: What has failed.
            message: What a person wants to know.
            worker: What else a `Failure` says of a worker.
        """
        failure = self._failure(kind, message, **worker)
        self._link.report(self._link.membership.fail(failure), _REPORT_S)

    def broke_here(self) -> bool:
        """Tell whether this host was the first to break its generation, and no other host of it is lost.

        Waits until the others have stopped for that, or those that are lost must have been missed.
        """
        deadline = Deadline(self._patience.missed_after_s)
        while True:
            view, version = self._link.look()
            failure = broken(view, self.generation)
            assert self.round is not None, "a generation was joined"
            if self.round.gone(view.members) or (failure is not None and failure.host != self.host):
                return False
            others = [view.members[host] for host in self.round.hosts if host != self.host]
            if all(member.ready > self.generation for member in others) or deadline.left_s <= 0:
                return True
            self._link.wait(version, deadline.left_s)

    def report_done(self) -> None:
        """Announce to all hosts that all workers of this one succeeded; retries while etcd is away."""
        self._link.report(self._link.membership.done(self.generation), _REPORT_S)

    def report_recovery(self, event: dict[str, Any]) -> None:
        """Show a recovery event to everybody; goes on trying while etcd is away."""
        self._link.report(self._link.membership.tell_recovery(event), _REPORT_S)

    def all_done(self) -> bool:
        """Tell whether the workers of every host in the current generation succeeded."""
        done = self._link.membership.view.done
        return self.round is not None and all((self.generation, seat.host) in done for seat in self.round.seats)

    def close(self, reason: str, failed: bool) -> None:
        """End the run for everyone, unless it has ended."""
        if self.closed is None:
            self._link.report(self._link.membership.close(Closed(reason=reason, failed=failed)), _CLOSE_S)

    def leave(self) -> bool:
        """Give up this host's place, disconnect, and tell whether etcd knows; other hosts go on without it."""
        _entered.discard(self)
        try:
            return self._link.leave()
        finally:
            self._claim.release()

    # How a generation is joined.

    def _join(self, deadline: Deadline) -> RendezvousInfo:
        """Return this host's place in the first whole round later than its own that has it."""
        self.stood_by, self.broke, self._avoided = False, None, None
        self._break_own_generation(deadline)
        arrivals, announcer = Arrivals(), Announcer(self._run_id)
        broken_s = time.monotonic()
        while True:
            view, version = self._link.look()
            self._raise_if_over()
            failure = broken(view, view.generation)
            whole = view.round if failure is None else None
            rank = self._rank_in(whole)
            if whole is not None and rank is not None and whole.generation > self.generation:
                if (info := self._enter(whole, rank, deadline)) is not None:
                    return info
                continue
            self.broke = failure and (self.broke or replace(failure, unix_s=time.time()))
            self._offer(view.generation + 1, deadline)
            now_unix_s = time.time()
            self._warn_of_quarantine(view, now_unix_s)
            is_outside = whole is not None and rank is None
            waiting = standby(view, self.host, self._max_nodes, now_unix_s) if is_outside else None
            if whole is not None:
                broken_s = time.monotonic()
            if waiting is not None:
                self.stood_by = True
                deadline.restart()
            decision = waiting or self._next_round(view, arrivals, now_unix_s, time.monotonic() - broken_s)
            announcer.tell(decision, view.generation + 1, deadline.left_s)
            self._raise_if_late(deadline, view, view.generation + 1, decision.reason)
            wait_s = decision.wait_s
            if decision.members is not None:
                # The mirror will show a formed round, but not that forming failed because the watermark has moved.
                wait_s = 1.0 if self._form(view, decision.members, deadline) else 0.05
            elif wait_s is None:
                # Nothing in etcd changes when a cool-down ends.
                wait_s = view.cool_down_s(now_unix_s)
            self._link.wait(version, deadline.left_s if wait_s is None else min(wait_s, deadline.left_s))

    def _break_own_generation(self, deadline: Deadline) -> None:
        """Make everyone stop before this host waits for them, whatever made it come here."""
        if self.generation == 0 or self.failure is not None or self.closed is not None:
            return
        if joining := self._joining():
            failure = self._failure("membership", f"the run grows by {', '.join(joining)}")
        else:
            failure = self._failure("restart", f"host {self.host} restarts its workers")
        self._link.report(self._link.membership.fail(failure), deadline.left_s)

    def _joining(self) -> list[str]:
        """Return the hosts with which the generation joined last is to grow now."""
        view = self._link.membership.view
        if view.elastic_s and view.captured_by is not None and time.monotonic() - self._joined_s < view.elastic_s:
            return []
        return newcomers(view, self._max_nodes, time.time())

    def _warn_of_quarantine(self, view: View, now_unix_s: float) -> None:
        """Log once that this host is in a quarantine, and again when it is in another one, if there may be others."""
        quarantine = view.quarantine_of(self.host, now_unix_s)
        if quarantine is not None and quarantine != self._avoided and self._max_nodes > 1:
            self._avoided = quarantine
            log.warning("host %s %s", self.host, quarantine.describe(now_unix_s))

    def _next_round(self, view: View, arrivals: Arrivals, now_unix_s: float, broken_s: float) -> FormingDecision:
        generation = view.generation + 1
        return next_round(
            view,
            generation=generation,
            min_nodes=self._min_nodes,
            max_nodes=self._max_nodes,
            since_arrival_s=arrivals.since_last_s(view, generation),
            last_call_s=self._patience.last_call_s,
            now_unix_s=now_unix_s,
            broken_s=broken_s,
        )

    def _form(self, view: View, members: tuple[Seat, ...], deadline: Deadline) -> bool:
        return self._link.request(lambda: self._link.membership.form(view, members), deadline.at_s)

    def _enter(self, formed: Round, rank: int, deadline: Deadline) -> RendezvousInfo | None:
        """Return our place in a round that has us at `rank`, None when it breaks before we are connected."""
        joined = self._serve_store(formed, deadline) if rank == 0 else self._reach_store(formed, deadline)
        if joined is None:
            return None
        if self.closed is not None or broken(self.view, formed.generation) is not None:
            return None  # Whoever has seen it earlier does not come to the store.
        store, addr, port = joined
        store.set_timeout(_STORE_TIMEOUT)
        self._offer(0, deadline)
        self.generation, self.round, self._store = formed.generation, formed, store
        self._joined_s = time.monotonic()
        log.info("run %s: generation %d has the hosts %s", self._run_id, formed.generation, ", ".join(formed.hosts))
        prefix = f"torch.rendezvous.{self._run_id}.{formed.generation}"
        info = RendezvousStoreInfo(addr, port)
        return RendezvousInfo(PrefixStore(prefix, store), rank, len(formed.seats), info)

    def _serve_store(self, formed: Round, deadline: Deadline) -> tuple[TCPStore, str, int]:
        members = self._link.membership.view.members.values()
        elsewhere = next((member for member in members if not is_loopback(member.addr)), None)
        if is_loopback(self.addr) and elsewhere is not None:
            raise RendezvousStateError(
                f"host {self.host} would serve the store at {self.addr}, where {elsewhere.host} ({elsewhere.addr}) "
                f"cannot reach it: give --local-addr on host {self.host}"
            )
        try:
            store = TCPStore(self.addr, 0, is_master=True, wait_for_workers=False)
        except (DistNetworkError, DistStoreError) as error:
            raise RendezvousStateError(
                f"host {self.host} cannot reach its own store at {self.addr}: give --local-addr ({_line(error)})"
            ) from error
        port = store.port
        self._link.request(
            lambda: self._link.membership.publish_store(formed.generation, self.addr, port), deadline.at_s
        )
        return store, self.addr, port

    def _reach_store(self, formed: Round, deadline: Deadline) -> tuple[TCPStore, str, int] | None:
        problem = f"host {formed.hosts[0]} does not say where its store is"
        connecting: Future[TCPStore] | None = None
        while True:
            view, version = self._link.look()
            if broken(view, formed.generation) is not None or self.closed is not None:
                return None
            self._raise_if_late(deadline, view, formed.generation, problem)
            if formed.generation not in view.stores:
                self._link.wait(version, deadline.left_s)
                continue
            addr, port = view.stores[formed.generation]
            connecting = connecting or _connect(addr, port)
            try:
                return connecting.result(_POLL_S), addr, port
            except TimeoutError:
                problem = f"the store of host {formed.hosts[0]} at {addr}:{port} does not answer"
            except (DistNetworkError, DistStoreError) as error:
                connecting = None
                problem = (
                    f"the store of host {formed.hosts[0]} at {addr}:{port} is out of reach; check the firewall, "
                    f"or give --local-addr there ({_line(error)})"
                )

    def _offer(self, ready: int, deadline: Deadline) -> None:
        """Become a member if need be, and announce the generation that this launcher could join."""
        membership = self._link.membership
        if not self._registered:
            self._link.request(
                lambda: membership.register(
                    self._terms, self.host, self.addr, self._nproc, self._role, lease_ttl_s=self._patience.lease_ttl_s
                ),
                deadline.at_s,
            )
            self._registered = True
        if ready != self._offered:
            self._link.request(lambda: membership.offer(ready), deadline.at_s)
            self._offered = ready

    def _raise_if_over(self) -> None:
        if self.closed is not None:
            message = f"run {self._run_id!r} is over: {self.closed.reason}"
            raise RendezvousClosedError(message) if self.closed.failed else RendezvousGracefulExitError(message)

    def _raise_if_late(self, deadline: Deadline, view: View, generation: int, reason: str) -> None:
        if deadline.left_s > 0:
            return
        # Those of whom the reason tells: a newer view may show others.
        ready = sorted(member.host for member in view.members.values() if member.ready == generation)
        raise RendezvousTimeoutError(
            f"generation {generation} of run {self._run_id!r} did not start within {deadline.patience_s:g} s: "
            f"{reason}. Ready hosts: {', '.join(ready) or 'none'}. Start the missing hosts with the same --rdzv-id and "
            "--rdzv-endpoint, or raise join_timeout in --rdzv-conf"
        )

    def _rank_in(self, formed: Round | None) -> int | None:
        return None if formed is None else formed.rank_of(self.host, self._session)

    def _failure(self, kind: str, message: str, **worker: Any) -> Failure:
        return Failure(
            generation=self.generation,
            host=self.host,
            kind=kind,
            began_step=None if self.round is None else self.round.began_step,
            unix_s=time.time(),
            message=message,
            **worker,
        )


def _connect(addr: str, port: int) -> "Future[TCPStore]":
    """Connect to a store in a thread: torch waits for the answer of a host that stands still without a limit."""
    connected: Future[TCPStore] = Future()

    def connect() -> None:
        try:
            timeout = timedelta(seconds=_CONNECT_S)
            connected.set_result(TCPStore(addr, port, is_master=False, wait_for_workers=False, timeout=timeout))
        except Exception as error:  # noqa: BLE001 - whoever waits for it gets it
            connected.set_exception(error)

    threading.Thread(target=connect, name="store", daemon=True).start()
    return connected


def _line(error: Exception) -> str:
    return str(error).partition("\n")[0]
