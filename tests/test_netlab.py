"""The laboratory network: rates in both directions, cuts, losses, and nothing left of a lab whose owner was killed."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import lab_state
import pytest
from cluster import wait_until
from netlab import LabHost, NetLab, NetLabError, lab_names

from resilient_run.daemon.base.process import started_ticks

pytestmark = pytest.mark.lab

COMMAND = (sys.executable, str(Path(__file__).parent.parent / "benchmarks" / "netlab.py"))

SINK = """
import socket, sys, time
with socket.create_server((sys.argv[1], 0)) as server:
    print(server.getsockname()[1], flush=True)
    sock, _ = server.accept()
    total, start = len(sock.recv(1)), time.monotonic()
    while data := sock.recv(1 << 20):
        total += len(data)
    print(total / (time.monotonic() - start), flush=True)
"""

SOURCE = """
import socket, sys
with socket.create_connection((sys.argv[1], int(sys.argv[2]))) as sock:
    sock.sendall(bytes(int(sys.argv[3])))
"""

PROBE = """
import socket, sys
socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=float(sys.argv[3])).close()
"""


def script(host: LabHost, text: str, *arguments: object) -> subprocess.Popen[str]:
    """Start Python code on a host."""
    return host.popen([sys.executable, "-c", text, *map(str, arguments)], stdout=subprocess.PIPE, text=True)


def transfer(source: LabHost, sink: LabHost, size_bytes: int) -> float:
    """Return the bits per second that a TCP transfer between two hosts reached."""
    with script(sink, SINK, sink.address) as receiving:
        assert receiving.stdout is not None
        port = receiving.stdout.readline().strip()
        with script(source, SOURCE, sink.address, port, size_bytes) as sending:
            assert sending.wait(60) == 0
        return 8 * float(receiving.stdout.readline())


def reaches(source: LabHost, target: LabHost, *, timeout_s: float) -> bool:
    """Tell whether a TCP connection between two hosts is made."""
    with script(target, SINK, target.address) as listening:
        assert listening.stdout is not None
        port = listening.stdout.readline().strip()
        # Its complaint is the expected answer.
        probe = source.popen(
            [sys.executable, "-c", PROBE, target.address, port, str(timeout_s)], stderr=subprocess.DEVNULL
        )
        code = probe.wait(60)
        listening.kill()
    return code == 0


def test_links_have_their_rate_in_both_directions(netlab: Callable[..., NetLab]) -> None:
    """Each direction is shaped by itself: the slowed host is slow as a source and as a sink, the others stay fast."""
    a, b, c = netlab(3, rate="80mbit").hosts
    b.slow("20mbit")
    for source, sink, size_bytes, bit_s in ((a, c, 5_000_000, 80e6), (b, a, 1_500_000, 20e6), (a, b, 1_500_000, 20e6)):
        shares = []
        while len(shares) < 5 and max(shares, default=0) <= 0.5:  # a busy machine makes a transfer slow, and none fast
            shares.append(transfer(source, sink, size_bytes) / bit_s)
        assert 0.5 < max(shares) < 1.15
    b.heal()
    assert b.status().rate_bit_s == 80_000_000


def test_cut_host_is_parted_until_it_is_healed(netlab: Callable[..., NetLab]) -> None:
    a, b, c = netlab(["a", "b", "c"], rate="1gbit").hosts
    assert reaches(a, b, timeout_s=30)
    b.cut()
    assert not b.status().attached
    assert not reaches(a, b, timeout_s=0.3)
    assert not reaches(b, c, timeout_s=0.3)
    assert reaches(a, c, timeout_s=30)
    b.heal()
    assert reaches(a, b, timeout_s=30)


def test_hosts_know_each_other_by_name(netlab: Callable[..., NetLab]) -> None:
    a, b = netlab(["a", "b"]).hosts
    lookup = "import socket; print(*map(socket.gethostbyname, ('a', 'b', socket.gethostname())))"
    with script(b, lookup) as asked:
        assert asked.stdout is not None
        assert asked.stdout.read().split() == [a.address, b.address, b.address]


def test_lost_host_has_no_process_no_memory_and_no_network(netlab: Callable[..., NetLab]) -> None:
    a, b = netlab(2).hosts
    with b.popen(["sleep", "600"]) as victim, a.popen(["sleep", "600"]) as other:
        assert b.pids() == [victim.pid]
        (b.shm_dir / "job").mkdir()
        (b.shm_dir / "job" / "slot").write_bytes(bytes(1 << 20))
        assert b.status().shm_used_bytes >= 1 << 20
        b.lose()
        assert victim.wait(30) == -9
        assert other.poll() is None
        other.kill()
    assert b.status().shm_used_bytes == 0
    assert (b.status().attached, a.status().attached) == (False, True)
    b.heal()
    assert reaches(a, b, timeout_s=30)


def test_shared_memory_of_a_host_is_its_own_and_bounded(netlab: Callable[..., NetLab]) -> None:
    a, b = netlab(2, shm_bytes=1 << 20).hosts
    (a.shm_dir / "slot").write_bytes(bytes(1 << 20))
    assert shutil.disk_usage(a.shm_dir).free == 0
    assert shutil.disk_usage(b.shm_dir).free == 1 << 20


def test_next_lab_removes_what_a_killed_owner_left(netlab: Callable[..., NetLab]) -> None:
    """SIGKILL of the owner leaves its processes, namespaces and mounts; the next lab of anybody clears them away."""
    owner_code = (
        f"import sys; sys.path.append({str(Path(COMMAND[1]).parent)!r}); from netlab import NetLab\n"
        "with NetLab(2) as lab:\n"
        "    sleeper = lab.hosts[1].popen(['sleep', '600'])\n"
        "    print(lab.name, sleeper.pid, flush=True)\n"
        "    sys.stdin.read()\n"
    )
    owner = subprocess.Popen(
        [sys.executable, "-P", "-c", owner_code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with owner:
        assert owner.stdout is not None
        name, sleeper = owner.stdout.readline().split()
        alive = netlab(1)
        assert name in lab_names(), "the lab of a living owner was removed"
        owner.kill()
    assert f"/{name}/" in Path("/proc/mounts").read_text()
    assert Path("/proc", sleeper).exists()
    netlab(1)
    assert name not in lab_names()
    assert f"/{name}/" not in Path("/proc/mounts").read_text()
    assert not [*Path("/run/netns").glob(f"netlab-{name}*"), *Path("/etc/netns").glob(f"netlab-{name}*")]
    wait_until(lambda: not Path("/proc", sleeper).exists(), timeout_s=30, what="the end of the lab's process")
    assert alive.name in lab_names()


def test_half_built_lab_is_removed(netlab: Callable[..., NetLab]) -> None:
    """`down` copes with a lab of which only a part exists, as after a crash in the middle of `up`."""
    lab = netlab(3)
    subprocess.run(["ip", "netns", "delete", f"netlab-{lab.name}-h2"], check=True)
    subprocess.run(["umount", str(lab.hosts[1].shm_dir)], check=True)
    subprocess.run(["ip", "netns", "delete", f"netlab-{lab.name}"], check=True)
    lab.down()
    assert lab.name not in lab_names()
    assert not list(Path("/run/netns").glob(f"netlab-{lab.name}*"))
    assert f"/{lab.name}/" not in Path("/proc/mounts").read_text()


def test_command_line(netlab: Callable[..., NetLab]) -> None:
    """up, exec, cut, slow, status, heal, lose and down, by hand as an operator would."""
    name = f"t{os.getpid()}"

    def run(*arguments: str) -> str:
        done = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, check=True)
        return done.stdout

    try:
        assert "10.73.0.2" in run("up", "2", "--rate", "50mbit", "--name", name)
        run("up", "1", "--rate", "60mbit", "--name", name)  # takes the place of the first
        host_id = run("exec", "--name", name, "h0", "--", "sh", "-c", "echo $RESILIENT_HOST_ID; ip -br address")
        assert host_id.startswith("h0\n")
        assert "10.73.0.1/16" in host_id
        run("cut", "h0", "--name", name)
        run("slow", "h0", "--rate", "10mbit", "--name", name)
        (host,) = json.loads(run("status", "--json", "--name", name))["hosts"]
        assert (host["attached"], host["rate_bit_s"], host["processes"]) == (False, 10_000_000, 0)
        run("heal", "h0", "--name", name)
        assert "60 Mbit/s" in run("status", "--name", name)
        run("lose", "h0", "--name", name)
        assert "cut" in run("status", "--name", name)
        failed = subprocess.run([*COMMAND, "cut", "h7", "--name", name], capture_output=True, text=True, check=False)
        assert failed.returncode == 1
        assert "has no host 'h7'" in failed.stderr
    finally:
        run("down", "--name", name)
    assert name not in lab_names()
    run("down", "--name", name)  # what is gone already is no error


def test_exit_code_of_a_command_is_the_command_s(netlab: Callable[..., NetLab]) -> None:
    lab = netlab(1)
    done = subprocess.run([*COMMAND, "exec", "--name", lab.name, "h0", "--", "sh", "-c", "exit 7"], check=False)
    assert done.returncode == 7


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("setpriv") is None, reason="needs root and setpriv")
def test_other_users_are_refused() -> None:
    done = subprocess.run(
        ["setpriv", "--reuid", "65534", "--clear-groups", *COMMAND, "up", "2"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "must run as root, not as uid 65534" in done.stderr


@pytest.mark.parametrize(
    ("text", "rate_bit_s"), [("200mbit", 200_000_000), ("1.5Gbit", 1_500_000_000), ("8kbit", 8000)]
)
def test_rates(text: str, rate_bit_s: int) -> None:
    assert lab_state.parse_rate(text) == rate_bit_s


@pytest.mark.parametrize("text", ["", "200", "200mb", "-1mbit", "0mbit", "1bit", "mbit", "1e9bit"])
def test_what_is_no_rate(text: str) -> None:
    with pytest.raises(NetLabError, match="not a rate"):
        lab_state.parse_rate(text)


@pytest.mark.parametrize("hosts", [0, [], ["a", "a"], ["a-b"], ["../x"], ["A"], ["x" * 21]])
def test_hosts_that_no_lab_can_have(hosts: int | list[str]) -> None:
    with pytest.raises(NetLabError):
        NetLab(hosts)


def test_unknown_lab_names_the_known_ones(netlab: Callable[..., NetLab]) -> None:
    lab = netlab(1)
    with pytest.raises(NetLabError, match=rf"no lab 'nowhere' \(labs: .*{lab.name}"):
        NetLab.attach("nowhere")
    assert NetLab.attach(lab.name).host("h0").address == "10.73.0.1"


def test_start_time_is_of_a_living_process_only() -> None:
    with subprocess.Popen(["sleep", "600"]) as child:
        started = started_ticks(child.pid)
        assert started is not None
        assert started >= (started_ticks(os.getpid()) or started + 1)
        child.kill()
        wait_until(lambda: started_ticks(child.pid) is None, timeout_s=30, what="a zombie")
