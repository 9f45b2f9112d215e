"""A run seen from outside through etcd: order faults on hosts that allow them, and watch what becomes of them."""

import asyncio
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any, Self

from resilient_run.ckpt.errors import DaemonError
from resilient_run.ckpt.format.pair import Pair
from resilient_run.daemon.base.codec import UNIX_S, Record, limited
from resilient_run.daemon.base.fields import Fields
from resilient_run.daemon.etcd.client import Entry, Etcd, EtcdConfig
from resilient_run.daemon.run import keys
from resilient_run.daemon.run.faults import Order
from resilient_run.daemon.run.observation import parse_observations
from resilient_run.daemon.run.rounds import Round


class InjectionError(Exception):
    """The run is not there, a host of it does not allow faults, or a fault was refused."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome(Record):
    """What became of an order.

    Attributes:
        ok: Whether the fault struck; if not, `what` says why.
        what: What happened.
        host: Where.
        unix_s: When.
        generation: Generation at that moment.
        step: Newest completed step of the host's ranks at that moment.
    """

    ok: bool
    what: str
    host: str
    unix_s: float = limited(high=UNIX_S)
    generation: int
    step: int


@dataclass(kw_only=True, slots=True)
class Sight:
    """What has been seen of a run; failures and recoveries stay here when their keys are gone.

    Attributes:
        round: The current generation, None before the first and after the run.
        watermark: The newest committed pair.
        failures: Generation → what etcd said of its failure.
        recoveries: (generation, host) → the recovery event of that host's launcher.
        observations: Everything that any host has observed, each once, in order.
        outcomes: Order id → what became of it.
        refusing: Hosts whose daemons say that their launcher allows no faults.
        ended: The run is over.
    """

    round: Round | None = None
    watermark: Pair | None = None
    failures: dict[int, dict[str, Any]] = field(default_factory=dict)
    recoveries: dict[tuple[int, str], dict[str, Any]] = field(default_factory=dict)
    observations: list[dict[str, Any]] = field(default_factory=list)
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    refusing: set[str] = field(default_factory=set)
    ended: bool = False

    def see(self, known: Mapping[str, Entry]) -> None:
        """Take in the state of every key of the run."""
        self.ended = keys.JOB not in known or known[keys.JOB].value.get("closed") is not None
        try:
            if (found := known.get(keys.ROUND)) is not None:
                self.round = Round.parse(found.value, revision=found.revision)
        except DaemonError:
            self.round = None
        self.refusing.clear()
        for name, entry in known.items():
            # What is not as it should be counts as not there.
            with suppress(DaemonError, ValueError):
                self._see(keys.split(name), entry.value)

    @property
    def is_whole(self) -> bool:
        """Tell whether the current generation is not broken and has committed a step of its own."""
        return (
            self.round is not None
            and self.round.generation not in self.failures
            and self.watermark is not None
            and self.watermark[0] == self.round.generation
        )

    @property
    def step(self) -> int:
        """The newest committed step, 0 before the first."""
        return 0 if self.watermark is None else self.watermark[1]

    def host_of(self, rank: int) -> str | None:
        """Return the host that runs `rank` in the current generation."""
        return None if self.round is None else self.round.host_of(rank)

    def _see(self, name: list[str], value: dict[str, Any]) -> None:
        match name:
            case [keys.WATERMARK]:
                self.watermark = Fields(value, keys.WATERMARK).pair()
            case [keys.FAILURES, generation]:
                self.failures.setdefault(int(generation), value)
            case [keys.RECOVERED, generation, host]:
                self.recoveries[int(generation), host] = value
            case [keys.HOSTS, host]:
                if value.get("injection") is not True:
                    self.refusing.add(host)
            case [keys.OUTCOMES, number]:
                self.outcomes[number] = Outcome.parse(value)
            case [keys.OBSERVATIONS, host]:
                known = {(seen["host"], seen["kind"], seen["unix_s"]) for seen in self.observations}
                for item in parse_observations(value):
                    if (host, item.kind, item.unix_s) not in known:
                        self.observations.append({"host": host, **item.to_value()})


class Injection:
    """A connection to a run; use it as an asynchronous context manager.

    Args:
        config: How to reach etcd.
        run_id: The run.

    Attributes:
        sight: What has been seen of the run.
    """

    def __init__(self, config: EtcdConfig, run_id: str) -> None:
        self._config = config
        self._run_id = run_id
        self._changed = asyncio.Condition()
        self._task: asyncio.Task[None] | None = None
        self.sight = Sight()

    async def __aenter__(self) -> Self:
        """Connect and return once the run was seen.

        Raises:
            InjectionError: There is no such run.
            EtcdError: etcd cannot be reached or refuses.
        """
        self._etcd = await Etcd.connect(self._config, prefix=keys.prefix(self._run_id))
        try:
            await self._revision()
            self._task = asyncio.create_task(self._follow())
            await self.wait_for(lambda sight: sight.round is not None, timeout_s=None)
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *exception: object) -> None:
        """Disconnect."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._etcd.close()

    async def order(self, order: Order) -> str:
        """Give the order and return its id.

        Raises:
            InjectionError: The host does not allow it, or the run ended.
        """
        self.check([order.host])
        number = f"{time.time():.3f}-{secrets.token_hex(3)}"
        revision = await self._revision()
        guards = {keys.JOB: revision}
        if not await self._etcd.commit(guards, {keys.ORDERS(number): order.to_value()}):
            raise InjectionError(f"run {self._run_id!r} ended or started over while a fault was ordered")
        return number

    def check(self, hosts: Iterable[str]) -> None:
        """Check that none of `hosts` says that it allows no faults: nobody would answer an order there.

        Raises:
            InjectionError: Some do.
        """
        if refusing := sorted(self.sight.refusing.intersection(hosts)):
            raise InjectionError(
                f"run {self._run_id!r} does not allow faults on {', '.join(refusing)}: start the launchers there with "
                "--rr-allow-injection"
            )

    async def take_back(self, number: str) -> None:
        """Delete an order; if it was not carried out yet, it never is."""
        await self._etcd.delete(keys.ORDERS(number))

    async def wait_for(self, condition: Callable[[Sight], bool], *, timeout_s: float | None) -> bool:
        """Wait until `condition` holds, the run has ended, or for `timeout_s`; tell whether it holds."""
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(lambda: condition(self.sight) or self.sight.ended)
        except TimeoutError:
            return False
        return condition(self.sight)

    async def _revision(self) -> int:
        entry = await self._etcd.get(keys.JOB)
        if entry is None:
            raise InjectionError(f"there is no run {self._run_id!r} at {self._config.where}; check --run-id")
        return entry.revision

    async def _follow(self) -> None:
        async with aclosing(self._etcd.follow()) as states:
            async for entries in states:
                async with self._changed:
                    self.sight.see(entries)
                    self._changed.notify_all()
