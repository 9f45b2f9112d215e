"""One vault has one owner: two logins of one user work at once, and nothing that somebody has open is removed."""

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import Host, has_ended, kill, recovered, stop, wait_until
from gated import STEPS, Gate, Vault, assert_undisturbed, on_etcd, train_to
from launchers import run_ctl

pytestmark = [pytest.mark.jobs, pytest.mark.timeout(900)]


class Login(Host):
    """A login of the user: a run directory of its own by default, and the vault that all logins have."""

    vault: Vault

    def _directories(self, root: Path) -> tuple[Path, Path]:
        self.xdg = root / self.name / "xdg"
        self.xdg.mkdir(mode=0o700)
        return self.vault.path, self.vault.path

    def environ(self, **more: str) -> dict[str, str]:
        env = {**super().environ(**more), "XDG_RUNTIME_DIR": str(self.xdg)}
        del env["RESILIENT_RUN_DIR"]
        return env

    def daemon_pid(self) -> int | None:
        return self.vault.owner

    def ctl(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run `resilientctl` in this login."""
        return run_ctl(arguments, self.environ())


@pytest.fixture
def vault(tmp_path: Path) -> Iterator[Vault]:
    made = Vault(tmp_path.name)
    yield made
    made.close()


@pytest.fixture
def logins(vault: Vault, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Login]]:
    monkeypatch.setattr(Login, "vault", vault, raising=False)
    made = [Login(name, tmp_path) for name in ("ssh", "cron")]
    yield made
    for login in made:
        login.close()


def test_two_logins_share_the_daemon_of_their_vault(
    logins: list[Login], vault: Vault, tmp_path: Path, etcd_endpoint: str
) -> None:
    """Each trains a run; garbage is collected; who started the daemon ends; workers, then the daemon, are killed."""
    gate = Gate(tmp_path / "gate")
    runs = [f"{tmp_path.name}-{login.name}" for login in logins]
    for login, run_id in zip(logins, runs, strict=True):
        login.launch(on_etcd(etcd_endpoint, run_id), gate.script, RESILIENT_HOST_ID="h")
    sock = vault.path / "resilientd.sock"
    wait_until(lambda: len(vault.jobs()) == 2, timeout_s=180, what="both jobs at one daemon")
    train_to(5, gate, logins, sock)
    owner, slots = vault.owner, vault.slots()
    assert owner is not None
    for login in logins:
        done = login.ctl("gc", "--json")
        assert json.loads(done.stdout)["removed"] == [], done.stderr
        assert {run for run, _ in vault.jobs()} == set(runs)
    assert vault.slots() == slots

    sockets = [login.xdg / "resilient-run" / "resilientd.sock" for login in logins]
    (of_who_started_it,) = [path for path in sockets if path.exists()]
    of_who_started_it.unlink()
    for login in logins:
        kill(login.pids()[1])
        wait_until(lambda login=login: login.starts() == 4, timeout_s=180, what="new workers", host=login)
    train_to(gate.step + 5, gate, logins, sock)
    assert vault.owner == owner

    kill(owner)
    train_to(gate.step + 5, gate, logins, sock)
    for login in logins:
        kill(login.pids()[0])
        wait_until(lambda login=login: login.starts() == 6, timeout_s=180, what="new workers", host=login)
    assert vault.owner not in (None, owner)
    gate.open(STEPS)
    for login in logins:
        assert login.wait(300) == 0, login.output
        assert recovered(login) == 2
        assert {event["steps_lost"] for event in login.recoveries()} <= {0, 1}
        assert_undisturbed([login])


def test_a_second_daemon_does_not_touch_a_vault_that_has_an_owner(
    logins: list[Login], vault: Vault, tmp_path: Path, etcd_endpoint: str
) -> None:
    gate = Gate(tmp_path / "gate")
    logins[0].launch(on_etcd(etcd_endpoint, tmp_path.name), gate.script)
    train_to(3, gate, [logins[0]], vault.path / "resilientd.sock")
    slots, owner = vault.slots(), vault.owner
    second = [sys.executable, "-P", "-m", "resilient_run.daemon", "--run-dir", str(tmp_path / "second")]
    second += ["--shm-dir", str(vault.path), "--orphan-ttl", "0"]
    done = subprocess.run(second, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert f"a daemon with pid {owner} already serves {vault.path}" in done.stderr
    assert vault.slots() == slots
    gate.open(STEPS)
    assert logins[0].wait(300) == 0, logins[0].output


def test_slots_that_a_trainer_has_mapped_are_no_garbage(
    logins: list[Login], vault: Vault, tmp_path: Path, etcd_endpoint: str
) -> None:
    """The launcher is stopped, so no daemon comes; its pid is not known to be one; only the trainers are left."""
    login = logins[0]
    gate = Gate(tmp_path / "gate")
    login.launch(on_etcd(etcd_endpoint, tmp_path.name), gate.script)
    train_to(3, gate, [login], vault.path / "resilientd.sock")
    assert login.launcher is not None
    stop(login.launcher.pid)
    assert vault.owner is not None
    kill(vault.owner)
    for path in vault.path.glob("*/job.json"):
        path.write_text(json.dumps({**json.loads(path.read_text()), "launcher_pid": None}))
    slots = vault.slots()
    wait_until(lambda: login.ctl("gc", "--json").returncode == 0, timeout_s=180, what="the vault to be free")
    done = login.ctl("gc", "--json")
    assert json.loads(done.stdout) == {"removed": [], "freed_bytes": 0}, done.stderr
    assert vault.slots() == slots
    login.launcher.send_signal(signal.SIGCONT)
    kill(login.pids()[0])
    gate.open(STEPS)
    assert login.wait(300) == 0, login.output
    assert recovered(login) == 1
    assert {event["steps_lost"] for event in login.recoveries()} <= {0, 1, None}, "the new daemon has heard of no step"


def test_vault_that_is_removed_under_a_run_gets_a_new_owner(
    logins: list[Login], vault: Vault, tmp_path: Path, etcd_endpoint: str
) -> None:
    """As by RemoveIPC; the login that comes next shares the new vault and its daemon."""
    gate = Gate(tmp_path / "gate")
    runs = [f"{tmp_path.name}-{login.name}" for login in logins]
    sock = vault.path / "resilientd.sock"
    logins[0].launch(on_etcd(etcd_endpoint, runs[0]), gate.script, RESILIENT_HOST_ID="h")
    train_to(3, gate, logins[:1], sock)
    lost = vault.owner
    assert lost is not None
    shutil.rmtree(vault.path)
    wait_until(lambda: has_ended(lost), timeout_s=60, what="the end of the daemon that nobody finds", host=logins[0])
    train_to(gate.step + 5, gate, logins[:1], sock)
    owner = vault.owner
    assert owner not in (None, lost)
    logins[1].launch(on_etcd(etcd_endpoint, runs[1]), gate.script, RESILIENT_HOST_ID="h")
    wait_until(lambda: len(vault.jobs()) == 2, timeout_s=180, what="both jobs at one daemon")
    kill(logins[0].pids()[0])
    wait_until(lambda: logins[0].starts() == 4, timeout_s=180, what="new workers", host=logins[0])
    gate.open(STEPS)
    for login in logins:
        assert login.wait(300) == 0, login.output
    assert vault.owner == owner
    assert recovered(logins[0]) == 1
    assert {event["steps_lost"] for event in logins[0].recoveries()} <= {0, 1}
    assert_undisturbed(logins[:1])
