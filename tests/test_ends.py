"""Ends of a run that another launcher sees otherwise, or etcd does not hear of: its id can go on from memory."""

import re
import signal
from collections.abc import Sequence

import pytest
from cluster import PACED, Cluster, Host
from etcd_process import EtcdProcess
from prepared import BEFORE

pytestmark = pytest.mark.jobs

STEPS = 12
OTHER_END = """
from resilient_run.daemon.run.records import Closed
from resilient_run.launcher.rendezvous.membership import Membership

close = Membership.close

async def close_second(self, closed):
    other = Closed(reason="another launcher gave up", failed=True)
    await self._commit(lambda life: life.end(other))
    await close(self, closed)

Membership.close = close_second
"""
"""Has the end of another launcher in etcd a moment before this one's."""

NO_ETCD = """
import os, signal
from resilient_run.launcher.rendezvous.membership import Membership

close = Membership.close

async def close_alone(self, closed):
    os.kill(int(os.environ["ETCD_PID"]), signal.SIGKILL)
    await close(self, closed)

Membership.close = close_alone
"""
"""Has etcd gone a moment before the end of this launcher is written."""


KILLED = """
import os, signal
from resilient_run.launcher.rendezvous.membership import Membership

async def leave(self):
    os.kill(os.getpid(), signal.SIGKILL)

Membership.leave = leave
"""
"""Is killed before it leaves."""


def run(
    hosts: Sequence[Host], etcd: EtcdProcess, steps: int, before: str = "", *, nnodes: str = "", last_call_s: int = 1
) -> tuple[list[int], str, list[list[int]]]:
    """Return the exit statuses of a run's launchers, what they say, and the steps that the worker of each completes."""
    arguments = ["--nnodes", nnodes or str(len(hosts)), "--nproc-per-node", "1"]
    arguments += ["--rdzv-backend", "etcd-v3", "--rdzv-id", "run"]
    arguments += ["--rdzv-endpoint", etcd.endpoint, "--rdzv-conf", f"lease_ttl=3,last_call_timeout={last_call_s}"]
    arguments += ["--local-addr", "127.0.0.1", "--rr-allow-different-script"]
    made = [len(host.steps()) for host in hosts]
    for host in hosts:
        host.launch(arguments, [*PACED, "--steps", str(steps)], **{BEFORE: before, "ETCD_PID": str(etcd.pid)})
    codes = [host.wait(240) for host in hosts]
    steps_of = [[step for _, step, _ in host.steps()[count:]] for host, count in zip(hosts, made, strict=True)]
    return codes, "".join(host.output for host in hosts), steps_of


def test_failure_elsewhere_keeps_what_a_success_would_throw_away(cluster: Cluster, etcd: EtcdProcess) -> None:
    hosts = [cluster.host("a")]
    codes, said, steps = run(hosts, etcd, STEPS, OTHER_END)
    assert (codes, steps[0][-1]) == ([0], STEPS), said
    assert "the run failed on another host; its checkpoints stay in memory: another launcher gave up" in said
    codes, said, steps = run(hosts, etcd, STEPS + 4)
    # Its last step may not have been committed any more.
    assert codes == [0], said
    assert steps in ([[*range(first, STEPS + 5)]] for first in (STEPS, STEPS + 1)), said
    assert etcd.ctl("get", "--prefix", "", "--keys-only").split() == []


def test_success_that_etcd_did_not_hear_keeps_what_it_holds(cluster: Cluster, etcd: EtcdProcess) -> None:
    hosts = [cluster.host("a")]
    codes, said, steps = run(hosts, etcd, STEPS, NO_ETCD)
    assert (codes, steps[0][-1]) == ([0], STEPS), said
    assert "left the run without telling etcd" in said
    etcd.kill()
    etcd.start()
    codes, said, steps = run(hosts, etcd, STEPS + 4)
    # How much of it was committed depends on how busy the machine is.
    assert codes == [0], said
    assert steps in ([[*range(first, STEPS + 5)]] for first in range(2, STEPS + 2)), said


def test_run_that_begins_anew_after_a_success_without_a_last_word_is_protected(
    cluster: Cluster, etcd: EtcdProcess
) -> None:
    """Its daemons have written their keys before the launchers clear away those of the life before."""
    hosts = [cluster.host("a"), cluster.host("b")]
    codes, said, _ = run(hosts, etcd, STEPS, KILLED)
    assert codes == [-signal.SIGKILL] * 2, said
    codes, said, steps = run(hosts, etcd, 40)
    assert (codes, steps) == ([0, 0], [[*range(1, 41)]] * 2), said
    assert re.search("protected: every step, 2 replicas on hosts (a, b|b, a)$", said, re.MULTILINE), said


FIRST_ROUND = """
import os, signal
from resilient_run.launcher.agent import ResilientAgent

assign = ResilientAgent._assign_worker_ranks

def assign_or_end(self, store, group_rank, *args):
    if self._rdzv.generation == 1 and group_rank == {rank}:
        {end}
    return assign(self, store, group_rank, *args)

ResilientAgent._assign_worker_ranks = assign_or_end
"""
"""A launcher ends once the first generation is formed, before ranks are assigned; that of rank 0 serves its store."""


def test_launcher_that_is_lost_before_ranks_are_assigned_is_waited_for_no_longer_than_its_lease(
    cluster: Cluster, etcd: EtcdProcess
) -> None:
    hosts = [cluster.host("a"), cluster.host("b")]
    killed = FIRST_ROUND.format(rank=0, end="os.kill(os.getpid(), signal.SIGKILL)")
    codes, said, steps = run(hosts, etcd, STEPS, killed, nnodes="1:2", last_call_s=15)
    assert sorted(codes) == [-signal.SIGKILL, 0], said
    assert sorted(steps) == [[], [*range(1, STEPS + 1)]], said
    assert "recovered in" in said


def test_run_that_fails_before_ranks_are_assigned_ends_for_all(cluster: Cluster, etcd: EtcdProcess) -> None:
    """The launcher with the store would wait five minutes for the one that failed."""
    hosts = [cluster.host("a"), cluster.host("b")]
    failed = FIRST_ROUND.format(rank=1, end="self._rdzv.close('a disk is full', failed=True); raise SystemExit(1)")
    codes, said, steps = run(hosts, etcd, STEPS, failed)
    assert (codes, steps) == ([1, 1], [[], []]), said
    assert "a disk is full" in said
