"""Real runs whose state grows where memory is short: the older steps in memory give way, and commits go on."""

import re
from pathlib import Path

import pytest
from cluster import Cluster, kill, wait_until
from gated import on_etcd
from test_rollback import rollback

from resilient_run.daemon.tier.tier import Tier

pytestmark = pytest.mark.jobs

SCRIPT = Path(__file__).parent / "growing_trainer.py"


class Growing:
    """One run of `growing_trainer.py` on some hosts."""

    def __init__(
        self, root: Path, endpoint: str, sizes: list[str], *, nnodes: int, memory: str, settings: str = ""
    ) -> None:
        self.cluster, self.gate, self.endpoint = Cluster(root), root / "end", endpoint
        (root / "rr.toml").write_text(settings or "[replication]\nkeep = 2\nkeep_every = 3\n")
        self.hosts = [self.cluster.host(name) for name in "ab"[:nnodes]]
        options = on_etcd(endpoint, self.cluster.name, nnodes=nnodes, nproc=2 // nnodes)
        for host, limit in zip(self.hosts, memory.split(",") * nnodes, strict=False):
            host.launch(
                [*options, "--rr-config", str(root / "rr.toml"), "--rr-memory", limit],
                [str(SCRIPT), str(self.gate), *sizes],
            )

    def await_commit(self, step: int) -> None:
        """Wait until `step` or a later one is committed."""
        wait_until(
            lambda: self.hosts[0].committed_step() >= step,
            timeout_s=60,
            what=lambda: f"step {step}, at {self.hosts[0].committed_step()}\n" + self.output,
        )

    def in_memory(self) -> list[int]:
        """Return the steps to which the run can go back in memory."""
        _, listed = rollback(self.cluster.name, self.endpoint, 999_999, run_dir=self.hosts[0].run_dir)
        found = re.search(r"these are: (.*) in memory", listed)
        assert found is not None, listed
        return [int(step) for step in found[1].split(", ")]

    def restored(self) -> int:
        """Return the step that a rank restored last."""
        return max((line["time"], line["restored"]) for line in list(self.hosts[0].lines))[1]

    def end(self) -> None:
        """Let the script end, and see that it ends well."""
        self.gate.touch()
        assert [host.wait() for host in self.hosts] == [0] * len(self.hosts), self.output

    @property
    def output(self) -> str:
        """What all launchers printed."""
        return "".join(host.output for host in self.hosts)


@pytest.mark.parametrize("nnodes", [1, 2])
@pytest.mark.parametrize(
    "sizes", [["0:0:4", "0:90:8", "1:0:4", "1:90:8"], ["0:0:4", "0:90:10", "1:0:4"]], ids=["all", "one"]
)
def test_older_steps_give_way_to_a_state_that_grows(
    tmp_path: Path, etcd_endpoint: str, nnodes: int, sizes: list[str]
) -> None:
    """Three slots of 4 MiB for each of two ranks have room, and of larger ones two for each rank."""
    held = tmp_path / "end.held"
    held.write_text("90")
    run = Growing(tmp_path, etcd_endpoint, sizes, nnodes=nnodes, memory="36M")
    try:
        run.await_commit(12)
        older, _ = run.in_memory()
        held.unlink()
        run.await_commit(110)
        assert len(run.in_memory()) == 1
        code, refused = rollback(run.cluster.name, etcd_endpoint, older, run_dir=run.hosts[0].run_dir)
        assert code == 1
        assert f"step {older} is not at hand" in refused
        committed = run.hosts[0].committed_step()
        kill(next(iter(run.hosts[0].pids().values())))
        run.await_commit(committed + 10)
        assert run.restored() >= committed
        assert len(run.in_memory()) == 1
        run.end()
    finally:
        run.cluster.close()


KEEP_ONE = "[replication]\nkeep = 1\n"


@pytest.mark.parametrize(
    ("nnodes", "memory", "sizes"),
    [
        (1, "14M", {0: 1, 20: 8, 40: 1}),
        (2, "14M", {0: 1, 20: 8, 40: 1}),
        (2, "40M,14M", {0: 1, 20: 6, 40: 1}),
        (2, "24M", {0: 1, **{10 + 2 * mib: mib for mib in range(2, 13)}, 40: 1}),
    ],
    ids=["one-host", "two-hosts", "unequal", "slowly"],
)
def test_commits_go_on_when_a_state_shrinks_that_had_no_room(
    tmp_path: Path, etcd_endpoint: str, nnodes: int, memory: str, sizes: dict[int, int]
) -> None:
    """There is room for one larger slot on a host, if at all, until each rank goes back to its size of before."""
    rows = [f"{rank}:{step}:{mib}" for rank in (0, 1) for step, mib in sizes.items()]
    run = Growing(tmp_path, etcd_endpoint, rows, nnodes=nnodes, memory=memory, settings=KEEP_ONE)
    try:
        run.await_commit(60)
        assert "no slots of the size that captures need now" in run.output or "not protected" in run.output
        run.end()
    finally:
        run.cluster.close()


def test_a_run_whose_state_has_no_room_goes_on_after_a_failure(tmp_path: Path, etcd_endpoint: str) -> None:
    """As it did before: it trains on, and says that it is not protected."""
    rows = [f"{rank}:{step}:{mib}" for rank in (0, 1) for step, mib in ((0, 1), (20, 8))]
    run = Growing(tmp_path, etcd_endpoint, rows, nnodes=1, memory="14M", settings=KEEP_ONE)
    host = run.hosts[0]
    try:
        wait_until(lambda: "no slots of the size" in run.output, timeout_s=60, what=lambda: run.output)
        kill(host.pids()[0])
        wait_until(lambda: host.starts() == 4, timeout_s=60, what=lambda: run.output)
        refusals = run.output.count("no slots of the size")
        wait_until(lambda: run.output.count("no slots of the size") > refusals, timeout_s=60, what=lambda: run.output)
        assert run.restored() <= host.committed_step() < 20
        run.end()
    finally:
        run.cluster.close()


def test_a_run_goes_back_to_an_older_step_beside_a_state_that_grows(tmp_path: Path, etcd_endpoint: str) -> None:
    """What it goes back to is smaller than what is in memory, grows again, and is persisted all the while."""
    sizes = ["0:0:2", "0:90:3", "0:180:6", "1:0:2", "1:90:3", "1:180:6"]
    tier = f'[persist]\ntarget = "{tmp_path / "tier"}"\nevery_steps = 10\nevery_s = 0\n'
    settings = f"[replication]\nkeep = 3\nkeep_every = 2\n\n{tier}"
    held = tmp_path / "end.held"
    held.write_text("90")
    run = Growing(tmp_path, etcd_endpoint, sizes, nnodes=2, memory="38M", settings=settings)
    try:
        run.await_commit(20)

        def goes_back() -> bool:
            """Until training is held, the step may go in the meantime."""
            older, run_dir = run.in_memory()[0], run.hosts[0].run_dir
            code, output = rollback(run.cluster.name, etcd_endpoint, older, "--timeout", "60", run_dir=run_dir)
            assert code == 0 or "is not at hand" in output, output
            return code == 0 and run.restored() == older

        wait_until(goes_back, timeout_s=60, what=lambda: run.output)
        held.write_text("180")
        run.await_commit(100)
        assert len(run.in_memory()) > 1
        held.unlink()
        run.await_commit(200)
        assert len(run.in_memory()) == 1
        wait_until(
            lambda: Tier(str(tmp_path / "tier"), run.cluster.name).published()[-1].step > 180,
            timeout_s=60,
            what="a published step of the last size",
            host=run.hosts[0],
        )
        run.end()
    finally:
        run.cluster.close()
