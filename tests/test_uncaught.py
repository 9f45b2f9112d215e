"""What people see where something fails or is interrupted: one cause, once, and last."""

import os
import re
import signal
from pathlib import Path

import pytest
from cluster import Cluster, Host, wait_until
from launchers import run_python

pytestmark = pytest.mark.jobs

HEAD = """
import os, sys, time
import torch
import torch.distributed as dist
from resilient_run import Checkpointer

dist.init_process_group("gloo")
rank = dist.get_rank()


class Keeps:
    def __init__(self, answer):
        self.answer = answer

    def state_dict(self):
        return self.answer()

    def load_state_dict(self, state):
        pass


def fails():
    raise RuntimeError("the data is bad")


"""


def launch(cluster: Cluster, tmp_path: Path, script: str, *options: str, forked: bool = True) -> Host:
    path = tmp_path / "train.py"
    path.write_text(HEAD + script)
    host = cluster.host("solo")
    host.forked = forked
    host.launch(["--standalone", "--nproc-per-node", "2", *options], [str(path)])
    return host


REFUSED = "Checkpointer(model=torch.nn.Linear(2, 2), odd=Keeps(lambda: {'x': object()}))\n"
WORDS = "StateError: odd.x: values of type builtins.object are not supported"


def test_a_refusal_is_shown_once_and_last(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    host = launch(cluster, tmp_path, REFUSED, forked=False)
    assert host.wait() == 1
    assert host.output.count("StateError") == 1, host.output
    assert WORDS in host.output.splitlines()[-1]
    shown = host.output[host.output.index("Error: rank") :]
    assert re.match(r"Error: ranks? \d(, 1)?: Traceback", shown)
    assert re.findall(r'File "(.*?)"', host.output) == [str(tmp_path / "train.py")]
    assert "no Checkpointer" not in host.output
    assert len(host.output.splitlines()) <= 10
    assert not list(tmp_path.glob("torchelastic_*"))


def test_a_refusal_is_in_the_log_that_somebody_wants_of_each_rank(cluster: Cluster, tmp_path: Path) -> None:
    host = launch(cluster, tmp_path, REFUSED, "--redirects=3", f"--log-dir={tmp_path / 'logs'}")
    assert host.wait() == 1
    logs = [path.read_text() for path in (tmp_path / "logs").rglob("stderr.log")]
    assert any(WORDS in text for text in logs)
    assert WORDS in host.output
    assert "no Checkpointer" not in host.output


def test_exceptions_of_the_script_are_shown_by_each_rank(cluster: Cluster, tmp_path: Path) -> None:
    host = launch(cluster, tmp_path, "Checkpointer(model=torch.nn.Linear(2, 2), odd=Keeps(fails))\n")
    assert host.wait() == 1
    assert re.search(r"\[rank[01]\]: RuntimeError: the data is bad", host.output)
    assert "in fails" in host.output


def test_a_worker_killed_while_it_writes_its_error_is_restarted(cluster: Cluster, tmp_path: Path) -> None:
    script = (
        "path = os.environ['TORCHELASTIC_ERROR_FILE']\n"
        "if rank == 0 and os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n"
        "    with open(path, 'w') as file:\n"
        "        file.write('{\"message')\n"
        "    os.kill(os.getpid(), 9)\n"
        "dist.barrier()\n"
        "print(f'rank {rank} came to its end', flush=True)\n"
    )
    host = launch(cluster, tmp_path, script, "--max-restarts=1")
    assert host.wait() == 0, host.output
    assert all(f"rank {rank} came to its end" in host.output for rank in (0, 1))


def test_a_failure_takes_no_more_lines_than_with_torchrun(cluster: Cluster, tmp_path: Path) -> None:
    """The frames of launcher and torch say nothing of it."""
    script = "if rank: fails()\ntime.sleep(600)\n"
    host = launch(cluster, tmp_path, script, forked=False)
    assert host.wait() == 1
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(tmp_path / "train.py")]
    ended = run_python(command, os.environ)
    assert ended.returncode == 1
    assert "RuntimeError: the data is bad" in host.output
    assert "Root Cause (first observed failure)" in host.output
    assert "launcher/" not in host.output
    assert len(host.output.splitlines()) < len((ended.stdout + ended.stderr).splitlines())


def test_ctrl_c_shows_where_the_script_was(cluster: Cluster, tmp_path: Path) -> None:
    marks = [tmp_path / f"mark{rank}" for rank in (0, 1)]
    script = (
        f"def slow():\n    os.mkdir(f'{tmp_path}/mark{{rank}}')\n    time.sleep(600)\n\n\n"
        "Checkpointer(model=torch.nn.Linear(2, 2), slow=Keeps(slow))\n"
    )
    path = tmp_path / "train.py"
    path.write_text(HEAD + script)
    host = cluster.host("solo")
    host.forked, host.prefix = False, ("setsid", "env", "--default-signal=INT")
    host.launch(["--standalone", "--nproc-per-node", "2"], [str(path)])
    wait_until(lambda: all(mark.exists() for mark in marks), timeout_s=60, what="both ranks", host=host)
    assert host.launcher is not None
    os.killpg(host.launcher.pid, signal.SIGINT)
    assert host.wait() == 1
    assert host.output.count("KeyboardInterrupt\n") == 2, host.output
    assert set(re.findall(r'File "(.*?)"', host.output)) == {str(path)}
    assert "got signal: 2" in host.output.splitlines()[-1]


def test_a_rank_that_left_early_is_named(cluster: Cluster, tmp_path: Path) -> None:
    """Its partner is the one that fails."""
    script = (
        "import psutil\n"
        "pids = [None, None]\n"
        "dist.all_gather_object(pids, os.getpid())\n"
        "if rank: sys.exit(0)\n"
        "while psutil.pid_exists(pids[1]) and psutil.Process(pids[1]).status() != 'zombie': time.sleep(0.01)\n"
        "sys.exit(3)\n"
    )
    host = launch(cluster, tmp_path, script)
    assert host.wait() == 1
    assert re.search(r"rank 0 \(pid \d+\) on host solo exited with code 3; rank 1 ended with status 0;", host.output)


def test_error_of_torch_before_there_are_workers_stands_alone(cluster: Cluster, tmp_path: Path) -> None:
    """etcd goes after whoever asks it."""
    host = launch(cluster, tmp_path, "", "--logs-specs=nowhere", forked=False)
    assert host.wait() == 1
    assert "Could not find entrypoint under 'torchrun.logs_specs[nowhere]'" in host.output
    assert "etcd" not in host.output


def test_few_open_files_are_enough_if_more_are_allowed_and_else_named(cluster: Cluster, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("import resource\nprint('limit', resource.getrlimit(resource.RLIMIT_NOFILE)[0])\n")
    host = cluster.host("solo")
    host.forked, host.prefix = False, ("sh", "-c", 'ulimit -Sn 96 && exec "$@"', "sh")
    host.launch(["--standalone"], [str(path)])
    assert host.wait() == 0, host.output
    assert host.output == "limit 96\n"
    host.text.clear()
    host.prefix = ("sh", "-c", 'ulimit -n 96 && exec "$@"', "sh")
    host.launch(["--standalone"], [str(path)])
    assert host.wait() == 1
    assert re.fullmatch(r"Error: etcd needs 151 open files, and the limit is 96: raise it .*\n", host.output)
