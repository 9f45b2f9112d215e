"""One job's observation stream on this host: gathers what is wrong now, logs every change once, tells etcd."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from resilient_run.ckpt.format.pair import Pair

from .base.policy import DetectPolicy, Policy
from .base.supervise import Supervisor
from .health.gpu import open_gpus
from .health.health import local_directory, measure_host
from .health.reach import Reach
from .health.straggler import Stragglers
from .health.threshold import Judge, Measure
from .run import keys
from .run.cpu_meter import cpu_seconds
from .run.hang import HangDetector
from .run.leased import LeasedKeys
from .run.observation import Observation, report_observations
from .run.view import JobView
from .run.work import RankWork

log = logging.getLogger(__name__)

_LOOK_S = 0.25
_LEVELS = {"info": logging.INFO, "warn": logging.WARNING, "fail": logging.ERROR}


class Observer:
    """Asks the detectors in turn and keeps what they say is wrong.

    Args:
        policy: The job's configuration.
        view: What is known of the job.
        keys: Where its observations are put, for as long as something is wrong.
        tmpfs: Directory of the slots.
        disks: Directories that need room, besides a local persistent tier.
        ask_peer: Returns once the daemon of a host has answered; raises `PeerError`.
        work: Returns what all ranks have computed, on the root.
        supervisor: Of the job's tasks.

    Attributes:
        hang: The hang detector, which hears from the trainers' sessions.
    """

    def __init__(
        self,
        *,
        policy: Policy,
        view: JobView,
        keys: LeasedKeys,
        tmpfs: Path,
        disks: Sequence[Path],
        ask_peer: Callable[[str], Awaitable[None]],
        work: Callable[[], Mapping[int, RankWork]],
        supervisor: Supervisor,
    ) -> None:
        self.hang = HangDetector(policy.detect)
        self._policy = policy.detect
        self._commits = policy.replication.scheme != "none"
        self._view = view
        self._keys = keys
        self._supervisor = supervisor
        self._tmpfs = tmpfs
        self._disks = [*disks, *local_directory(policy.persist.target)]
        self._reach = Reach(view, ask_peer, policy.detect.peer_unreachable_s)
        self._work = work
        self._stragglers = Stragglers(policy.detect)
        self._wrong: dict[str, Mapping[str, Observation]] = {}

    async def run(self) -> None:
        """Observe until cancelled."""
        async with asyncio.TaskGroup() as group:
            keep = self._supervisor.keep
            group.create_task(keep("watch training", self._watch_training))
            group.create_task(keep("watch host", self._watch_host))
            group.create_task(keep("watch GPUs", self._watch_gpus))
            if self._policy.peer_unreachable_s:
                group.create_task(keep("watch peers", self._watch_peers))

    def update(self, source: str, found: Mapping[str, Observation]) -> None:
        """Replace all that the detector `source` found by `found`, which is by what it is about."""
        before, news = self._wrong.get(source, {}), False
        self._wrong[source] = found
        for name in sorted(before.keys() | found.keys()):
            old, new = before.get(name), found.get(name)
            if old is not None and new is not None and old.identity == new.identity:
                continue
            news = True
            if new is not None:
                log.log(_LEVELS[new.severity], "%s (%s): %s", new.kind, new.severity, new.message)
            elif old is not None:
                log.info("%s is over: %s", old.kind, old.message)
        if news:
            self._keys.set(keys.OBSERVATIONS(self._view.host), report_observations(self._all()))

    def describe(self) -> list[dict[str, Any]]:
        """Return what is wrong now, for `resilientctl status`."""
        report = report_observations(self._all())
        return [] if report is None else list(report["observations"])

    async def _watch_training(self) -> None:
        judge, ranks = Judge(), Judge()
        while True:
            if suspects := self.hang.suspects():
                # To find their children takes a look at every process of the host.
                self.hang.measured(await asyncio.to_thread(_cpu_seconds, suspects))
            generation = 0 if self._view.finishing else self._view.generation
            hang = self.hang.check(
                generation,
                self._view.own_ranks,
                process_state,
                elsewhere=self._view.sign_elsewhere,
                overlooked=self._view.overlooks,
            )
            self.update("hang", {} if hang is None else {"hang": hang})
            if self._view.sign_here != self.hang.sign:
                self._view.sign_here = self.hang.sign
            if self._commits:
                self.update("commits", judge.judge(measure_lag(self.hang.steps, self._view.committed, self._policy)))
            if self._policy.straggler_factor > 1:
                self.update("stragglers", ranks.judge(self._slow_ranks()))
            await asyncio.sleep(_LOOK_S)

    def _slow_ranks(self) -> Iterator[Measure]:
        """Yield which ranks of the run are slow, none where this host is not the root."""
        round_, election = self._view.round, self._view.leader_revision
        if self._view.is_root and round_ is not None and election:
            self._stragglers.hear(round_, election, self._work())
            yield from self._stragglers.measures(round_)

    async def _watch_host(self) -> None:
        judge = Judge()
        while True:
            measures = await asyncio.to_thread(measure_host, self._policy, tmpfs=self._tmpfs, disks=self._disks)
            self.update("host", judge.judge(measures))
            await asyncio.sleep(self._policy.sample_s)

    async def _watch_gpus(self) -> None:
        """Watch what the driver tells, apart from the rest: a driver may hang with its GPU."""
        gpus = await asyncio.to_thread(open_gpus, self._policy)
        if gpus is None:
            return
        judge = Judge()
        while True:
            # Cancelled here, a thread may be in the driver still, which is then not to be shut down.
            measures = await asyncio.to_thread(gpus.measure)
            self.update("gpus", judge.judge(measures))
            try:
                await asyncio.sleep(self._policy.sample_s)
            except asyncio.CancelledError:
                gpus.close()
                raise

    async def _watch_peers(self) -> None:
        judge = Judge()
        while True:
            await self._reach.ask_all()
            self.update("peers", judge.judge(self._reach.measure()))
            await asyncio.sleep(self._reach.pause_s)

    def _all(self) -> Iterator[Observation]:
        return (item for found in self._wrong.values() for item in found.values())


def measure_lag(steps: tuple[int, int] | None, committed: Pair | None, policy: DetectPolicy) -> list[Measure]:
    """Return how far commits are behind training.

    Args:
        steps: The first and the newest step of this generation, None before the first.
        committed: The newest committed pair.
        policy: The limit.
    """
    if steps is None:
        return []
    first, newest = steps
    lag = newest - max(first - 1, 0 if committed is None else committed[1])
    return [
        Measure(
            name="lag",
            kind="replication_slow",
            value=lag,
            warn=policy.replication_lag_steps,
            message=f"step {newest} is done, but the newest committed one is {lag} steps older: the network, a peer "
            "or etcd does not keep up",
        )
    ]


def _cpu_seconds(pids: Mapping[int, int]) -> dict[int, float]:
    return {rank: cpu_seconds(pid) for rank, pid in pids.items()}


def process_state(pid: int) -> str:
    """Return the state of a process as `psutil` names it, "gone" when there is none."""
    try:
        return str(psutil.Process(pid).status())
    except psutil.NoSuchProcess:
        return "gone"
