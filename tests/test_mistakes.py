"""Mistakes of scripts in whole jobs: each ends the run at its first start, and one line says which it is."""

import re

import pytest
from cluster import Cluster, Host, recovered, wait_until

pytestmark = pytest.mark.jobs

TRAIN = """
import json, os, signal, sys, time
import torch
import torch.distributed as dist
from resilient_run import Checkpointer

mode, begin = sys.argv[1], sys.argv[2]
rank, generation = int(os.environ["RANK"]), int(os.environ["RESILIENT_GENERATION"])
print(json.dumps({"rank": rank, "pid": os.getpid(), "generation": generation}), flush=True)
dist.init_process_group("gloo")
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
checkpointer = Checkpointer(model=model, optimizer=optimizer, note=None)
try:
    start = 0 if mode == "norestore" else checkpointer.restore()
    print(json.dumps({"rank": rank, "start": start}), flush=True)
    while generation == 1 and rank == 1 and not os.path.exists(begin):
        time.sleep(0.01)
    for step in range(start, 8):
        if (mode, rank) == ("early", 1):
            raise KeyError("column")
        if step == 4 and mode == "poison":
            raise ValueError("this batch is poison")
        if step == 4 and mode == "exit":
            sys.exit(3)
        if step > start and mode == "creep":
            raise ValueError(f"batch {step} of {os.getpid()} is poison")
        loss = model(torch.ones(4)).sum()
        dist.all_reduce(loss.detach())
        loss.backward()
        optimizer.step()
        if mode == "value" and step == 4:
            checkpointer.values["note"] = object()
        checkpointer.step({"zero": step, "same": 1, "back": 8 - step}.get(mode, step + 1))
        if mode in ("killed", "later") and step == 4 and generation == 1:
            try:
                checkpointer.step(0)
            except ValueError:
                while mode == "killed" and rank == 0:
                    if checkpointer.watermark is not None:  # else there is nothing to go back to
                        os.kill(os.getpid(), signal.SIGKILL)
                    time.sleep(0.01)
        if (mode, generation, rank) == ("later", 1, 0) and (checkpointer.watermark or (0, 0))[1] > 5:
            sys.exit(3)
        if mode in ("poison", "exit", "value", "creep", "later"):  # else a step may be passed over
            checkpointer.wait()
            while (checkpointer.watermark or (0, 0))[1] <= step:
                time.sleep(0.01)
finally:
    dist.destroy_process_group()
"""

AT_ONCE = {
    "zero": "step(0): n is the number of completed steps, at least 1",
    "norestore": "step(1) before restore(): call restore() once, before the first step; this run continues from step 0",
    "same": "step(1) after step(1): completed steps must increase",
    "back": "step(7) after step(8): completed steps must increase",
    "value": "values.note: values of type builtins.object are not supported",
    "early": "nothing is committed yet: only --max-restarts counts (0 left)",
}


def launch(cluster: Cluster, endpoint: str, names: str, mode: str, *extra: str, size: int = 2) -> list[Host]:
    """Start a run of two ranks on `size` of the hosts; rank 1 goes on from its first step once told so, if `extra`."""
    directory = cluster.host(names[0]).run_dir.parent
    script, begin = directory / "train.py", directory / "begin"
    script.write_text(TRAIN)
    if mode != "lost":
        begin.touch()
    arguments = [f"--nnodes={size}", f"--nproc-per-node={2 // size}", "--rdzv-backend=etcd-v3", *extra]
    arguments += [f"--rdzv-endpoint={endpoint}", f"--rdzv-id={cluster.name}", "--local-addr=127.0.0.1"]
    hosts = [cluster.host(name) for name in names]
    for host in hosts:
        host.launch([*arguments, "--rdzv-conf=lease_ttl=3"], [str(script), mode, str(begin)])
    return hosts


def generations(host: Host) -> list[int]:
    return sorted({line["generation"] for line in host.lines if "generation" in line})


@pytest.mark.parametrize(("mode", "names"), [*((mode, "a") for mode in AT_ONCE), ("same", "ab"), ("early", "ab")])
def test_mistake_ends_the_run_at_its_first_start(cluster: Cluster, etcd_endpoint: str, mode: str, names: str) -> None:
    hosts = launch(cluster, etcd_endpoint, names, mode, size=len(names))
    assert [host.wait() for host in hosts] == [1] * len(hosts)
    for host in hosts:
        assert generations(host) == [1], host.output
    told = [[line for line in host.text if AT_ONCE[mode] in line] for host in hosts]
    assert len(told[0]) == 1 if len(hosts) == 1 else any(told), told


@pytest.mark.parametrize(("mode", "names"), [("poison", "a"), ("exit", "a"), ("poison", "ab")])
def test_same_failure_twice_ends_the_run(cluster: Cluster, etcd_endpoint: str, mode: str, names: str) -> None:
    hosts = launch(cluster, etcd_endpoint, names, mode, size=len(names))
    assert [host.wait() for host in hosts] == [1] * len(hosts)
    output = "".join(host.output for host in hosts)
    assert "one did so before, after step 4 too: only --max-restarts counts (0 left)" in output
    for host in hosts:
        assert generations(host) == [1, 2], host.output
    assert f"exitcode  : {3 if mode == 'exit' else 1}" in output


def test_same_failure_a_step_further_each_time_ends_the_run(cluster: Cluster, etcd_endpoint: str) -> None:
    hosts = launch(cluster, etcd_endpoint, "ab", "creep")
    assert [host.wait() for host in hosts] == [1, 1]
    assert "training failed 5 times at steps 1 to 5 in the same way, so a restart does not help" in hosts[0].output
    assert re.search(r"the last time: rank \d \(pid \d+\) on host [ab] exited with code 1", hosts[0].output)
    assert 5 <= generations(hosts[0])[-1] <= 12


@pytest.mark.parametrize("mode", ["killed", "later"])
def test_mistake_that_the_script_has_caught_ends_nothing(cluster: Cluster, etcd_endpoint: str, mode: str) -> None:
    """A signal ends the worker before it has shown by another step that it goes on, or it exits some steps later."""
    (host,) = launch(cluster, etcd_endpoint, "a", mode, size=1)
    assert host.wait() == 0, host.output
    assert recovered(host) == 1


def test_host_that_is_lost_before_anything_is_committed_is_replaced(cluster: Cluster, etcd_endpoint: str) -> None:
    """The rank of another host fails in a collective because of that, and not because the script is wrong."""
    hosts = launch(cluster, etcd_endpoint, "abc", "lost")
    starts = [lambda host=host: any("start" in line for line in host.lines) for host in hosts]
    wait_until(lambda: sum(has() for has in starts) == 2, timeout_s=60, what="both ranks")
    (lost,) = [host for host in hosts if any(line.get("rank") == 1 for line in host.lines)]
    lost.lose()
    for host in hosts:
        if host is not lost:
            assert host.wait() == 0, host.output
            assert generations(host)[-1] == 2
