"""`resilientctl exporter`: what it tells of a real run, whom it tells it, and that nothing a client does ends it."""

import base64
import contextlib
import http.client
import itertools
import json
import os
import re
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml
from certificates import make_certificates
from click.testing import CliRunner
from cluster import ENDLESS, Cluster, Host, kill, recovered, wait_until
from launchers import start_ctl
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from resilient_run.daemon.ctl.cli import resilientctl
from resilient_run.daemon.ctl.exporter import _password
from resilient_run.daemon.exporter import server as server_module
from resilient_run.daemon.exporter.history import History
from resilient_run.daemon.exporter.metrics import _run
from resilient_run.daemon.exporter.server import ExporterServer
from resilient_run.daemon.run.recoveries import Recoveries

pytestmark = pytest.mark.jobs

PASSWORD = "0123456789abcdef"
MONITORING = Path(__file__).parent.parent / "examples" / "monitoring"
CHROMIUM = shutil.which("chromium")


class Exporter:
    """A real `resilientctl exporter` of a host."""

    def __init__(self, host: Host, *options: str) -> None:
        directories = ["--run-dir", str(host.run_dir), "--shm-dir", str(host.shm_dir)]
        arguments = [*directories, "exporter", "--listen", "127.0.0.1:0", *options]
        self.process = start_ctl(arguments, os.environ, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().split()[-1]
        self.port = int(self.url.rpartition(":")[2])

    def get(
        self, path: str, authorization: str | None = None, tls: ssl.SSLContext | None = None
    ) -> tuple[int, bytes, http.client.HTTPMessage]:
        """Return the code, the body and the headers of an answer."""
        address = ("127.0.0.1", self.port)
        connection = (
            http.client.HTTPConnection(*address, timeout=60)
            if tls is None
            else http.client.HTTPSConnection(*address, timeout=60, context=tls)
        )
        with contextlib.closing(connection):
            connection.request("GET", path, headers={} if authorization is None else {"Authorization": authorization})
            answer = connection.getresponse()
            return answer.status, answer.read(), answer.headers

    def metrics(self, authorization: str | None = None) -> dict[tuple[str, ...], float]:
        """Return name and labels but those of the run → value."""
        code, body, headers = self.get("/metrics", authorization)
        assert code == 200
        assert headers["Content-Type"].startswith("application/openmetrics-text")
        found = {}
        for family in text_string_to_metric_families(body.decode()):
            for sample in family.samples:
                labels = [value for name, value in sorted(sample.labels.items()) if name not in ("run_id", "host")]
                found[sample.name, *labels] = sample.value
        return found

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    """A host whose run of two ranks goes on for as long as the test."""
    cluster = Cluster(tmp_path)
    host = cluster.host("a")
    host.launch(["--standalone", "--nproc-per-node", "2"], ENDLESS)
    wait_until(lambda: host.committed_step() > 2, timeout_s=120, what="a commit", host=host)
    yield host
    cluster.close()


def basic(password: str) -> str:
    return "Basic " + base64.b64encode(f"anybody:{password}".encode()).decode()


def expressions() -> list[tuple[str, str]]:
    """Return the queries of the alert rules and of the dashboard, each with where it is."""
    rules = yaml.safe_load((MONITORING / "alerts.yml").read_text())
    found = [(rule["alert"], rule["expr"]) for group in rules["groups"] for rule in group["rules"]]
    dashboard = json.loads((MONITORING / "grafana-dashboard.json").read_text())
    panels = [*dashboard["panels"]]
    for panel in panels:
        panels += panel.get("panels", [])
        found += [(panel["title"], target["expr"]) for target in panel.get("targets", ())]
    return found


@pytest.mark.parametrize(("name", "expression"), expressions())
def test_queries_of_the_examples_are_promql(name: str, expression: str) -> None:
    # What Grafana puts in before Prometheus sees the query.
    expression = re.sub(r"\[\$__\w+\]", "[5m]", expression)
    assert promql_parser.parse(re.sub(r"\$\w+", "text", expression)), name


def used_names() -> set[str]:
    """Return the metrics that the examples for Prometheus and Grafana ask for."""
    return set(re.findall(r"resilient_\w+", "".join(path.read_text() for path in MONITORING.iterdir())))


def names_of(exposition: str) -> set[str]:
    """Return the names of all samples that there may be, also of those without a value now."""
    families = text_string_to_metric_families(exposition)
    return {
        family.name.removeprefix("resilient_") + ("_total" if family.type == "counter" else "") for family in families
    }


def rendered(url: str, directory: Path, *options: str) -> str:
    """Return the document that a browser has made of the page at `url`."""
    assert CHROMIUM is not None
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    command += ["--disable-sync", "--no-first-run", f"--user-data-dir={directory}", "--virtual-time-budget=3000"]
    command += ["--dump-dom", *options, url]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout


def recovery_of_a_killed_worker(host: Host) -> dict[str, Any]:
    """Kill a worker of the run, and return what is told of the recovery."""
    kill(host.pids()[1])
    wait_until(lambda: recovered(host) == 1, timeout_s=60, what="the recovery", host=host)
    (event,) = host.recoveries()
    return event


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
def test_a_browser_shows_a_recovery(host: Host, tmp_path: Path) -> None:
    event = recovery_of_a_killed_worker(host)
    with contextlib.closing(Exporter(host, "--open")) as exporter:
        told = ("resilient_recoveries_total", "worker_exit")
        wait_until(lambda: exporter.metrics().get(told), timeout_s=30, what="the recovery", host=host)
        page = rendered(exporter.url, tmp_path / "browser")
    assert f"{event['steps_lost']} step{'' if event['steps_lost'] == 1 else 's'} lost" in page
    assert event["cause"] in page
    assert 'title="restore ' in page


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
def test_the_page_draws_steps_and_failures(tmp_path: Path) -> None:
    """Here from an answer of its own, so that there is a past."""
    began_unix_s = time.time() - 3600
    recovery = {"unix_s": began_unix_s + 1800, "cause": "rank 1 was killed", "generation": 2, "complete": True}
    protection = {"protected": True, "steps_at_risk": 1, "reason": ""}
    job = {
        "run_id": "drawn", "host": "a", "generation": 2, "world_size": 1, "own_ranks": [0], "bytes": 0, "failure": None,
        "hosts": ["a"], "holders": [], "observations": [], "protection": protection,
        "root": {"host": "a", "quarantines": {}, "decisions": []}, "replication": {"every": 1, "iteration_s": 1.0},
        "goodput": {"failures": [{**recovery, "down_s": 1.0, "steps_lost": 1}], "effective_ratio": 1.0, "count": 1},
    }  # fmt: skip

    def at(step: int) -> dict[str, Any]:
        now = {**job, "last_steps": {"0": step}, "watermark": {"generation": 2, "step": step - 1}}
        return {"jobs": [now], "used_bytes": 0, "limit_bytes": 1}

    with ExporterServer(("127.0.0.1", 0), lambda: at(400), password=None) as server:
        server._history.add_to(at(100), began_unix_s)
        server._history.add_to(at(300), began_unix_s + 1700)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        page = rendered(f"http://127.0.0.1:{server.server_address[1]}/", tmp_path / "browser")
        server.shutdown()
    assert "<h1>resilient-run</h1>" in page
    assert re.search(r'class="step" d="M0\.0 99\.7L47\d\.\d 33\.\dL', page)  # 99 to 400 steps
    assert re.search(r'<line class="lost" x1="(?:499|500)\.\d".*?><title>.*?: rank 1 was killed</title>', page)
    assert "step 400" in page
    assert "step 99, " in page


def test_a_history_covers_days_with_few_points() -> None:
    history, job = History(), {"run_id": "r", "host": "a", "generation": 1, "watermark": None, "last_steps": {}}
    for second in range(100_000):
        history.add_to({"jobs": [job]}, float(second))
    points = job["history"]
    assert len(points) <= 241
    assert points[0] == (0.0, None, None)
    assert points[-1] == (99_999.0, None, None)
    gaps = {after[0] - before[0] for before, after in itertools.pairwise(points)}
    assert len(points) > 100
    assert max(gaps) <= 100_000 / 100
    history.add_to({"jobs": [{**job, "run_id": "other"}]}, 1e6)
    again = {**job, "last_steps": {"0": 7}, "watermark": {"generation": 1, "step": 6}}
    history.add_to({"jobs": [again]}, 2e6)
    assert again["history"] == [(2e6, 7, 6)], "a run that went is forgotten"


def test_launchers_of_one_run_at_one_daemon_have_a_history_each() -> None:
    history = History()
    for second in (10.0, 20.0):
        jobs = [
            {"run_id": "r", "host": host, "generation": 1, "watermark": None, "last_steps": {0: step}}
            for host, step in (("vm", 3), ("vm#1", 4))
        ]
        history.add_to({"jobs": [*jobs, {"run_id": "r", "host": "vm#2"}]}, second)
    assert [job["history"] for job in jobs] == [
        [(10.0, 3, None), (20.0, 3, None)],
        [(10.0, 4, None), (20.0, 4, None)],
    ]


def test_a_clock_that_is_set_back_ends_no_history() -> None:
    history = History()
    for second, step in ((100.0, 1), (5000.0, 2), (110.0, 3), (120.0, 4)):
        job = {"run_id": "r", "host": "a", "generation": 1, "watermark": None, "last_steps": {"0": step}}
        history.add_to({"jobs": [job]}, second)
    assert job["history"] == [(100.0, 1, None), (110.0, 3, None), (120.0, 4, None)]


def test_a_killed_worker_is_in_the_metrics(host: Host) -> None:
    event = recovery_of_a_killed_worker(host)
    wait_until(lambda: host.committed_step() > event["restored_step"] + 5, timeout_s=60, what="commits", host=host)
    with contextlib.closing(Exporter(host, "--open")) as exporter:
        metrics = wait_until(
            lambda: found if (found := exporter.metrics()).get(("resilient_recoveries_total", "worker_exit")) else None,
            timeout_s=30,
            what="the recovery",
        )
        assert metrics[("resilient_up",)] == 1
        assert metrics[("resilient_failed",)] == 0
        assert metrics[("resilient_generation",)] == 2
        assert metrics[("resilient_world_size_ranks",)] == metrics[("resilient_attached_ranks",)] == 2
        assert metrics[("resilient_step",)] >= metrics[("resilient_committed_step",)] > event["restored_step"]
        assert metrics[("resilient_commits_total",)] > 0
        assert metrics[("resilient_recoveries_total", "worker_exit")] == 1
        assert metrics[("resilient_down_seconds_total",)] == event["total_s"]
        assert metrics[("resilient_lost_steps_total",)] == event["steps_lost"]
        assert metrics[("resilient_recovery_seconds_total", "restore")] == event["restore_s"]
        assert 0 < metrics[("resilient_effective_training_ratio",)] < 1
        assert 0 < metrics[("resilient_slots_used_bytes",)] < metrics[("resilient_slots_limit_bytes",)]
        step = metrics[("resilient_step",)]
        wait_until(lambda: exporter.metrics()[("resilient_step",)] > step, timeout_s=60, what="a step", host=host)
        assert exporter.get("/healthz")[:2] == (200, b"ok\n")
        assert used_names() <= {f"resilient_{name}" for name in names_of(exporter.get("/metrics")[1].decode())}
        code, body, _ = exporter.get("/")
        assert code == 200
        assert b"<html" in body
        assert json.loads(exporter.get("/status.json")[1])["jobs"][0]["generation"] == 2
        assert exporter.get("/other")[0] == 404
        pid = host.daemon_pid()
        assert host.launcher is not None
        assert pid is not None
        kill(host.launcher.pid)
        kill(pid)
        wait_until(lambda: exporter.get("/healthz")[0] == 503, timeout_s=30, what="the daemon's end")
        assert exporter.metrics() == {("resilient_up",): 0.0}
        assert exporter.get("/status.json")[0] == 503


def test_only_who_knows_the_password_is_told(host: Host, tmp_path: Path) -> None:
    make_certificates(tmp_path)
    secret = tmp_path / "password"
    secret.write_text(f"{PASSWORD}\n")
    secret.chmod(0o600)
    tls = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
    encrypted = ("--certificate", str(tmp_path / "server.pem"), "--private-key", str(tmp_path / "server.key"))
    with contextlib.closing(Exporter(host, "--password-file", str(secret), *encrypted)) as exporter:
        assert exporter.url.startswith("https://")
        for path in ("/", "/metrics", "/status.json", "/other"):
            for wrong in (
                None,
                basic("x" * 16),
                basic(""),
                "Bearer ",
                f"Bearer {PASSWORD}x",
                "Basic %",
                "Basic é",
                PASSWORD,
            ):
                code, body, headers = exporter.get(path, wrong, tls)
                assert code == 401, (path, wrong)
                assert headers["WWW-Authenticate"].startswith("Basic ")
                assert body == b"a password is needed\n"
        for right in (basic(PASSWORD), f"Bearer {PASSWORD}"):
            assert b"resilient_up 1.0" in exporter.get("/metrics", right, tls)[1]
        code, body, _ = exporter.get("/healthz", None, tls)
        assert (code, body) == (200, b"ok\n")
        with pytest.raises((OSError, http.client.HTTPException)):
            exporter.get("/healthz")


def test_clients_that_say_nothing_or_nonsense_keep_nobody_out_for_long(host: Host) -> None:
    with contextlib.closing(Exporter(host, "--open")) as exporter, contextlib.ExitStack() as silent:
        for content in (b"\0" * 70000, b"GET /metrics\r\n", b"POST / HTTP/1.1\r\n\r\n", b"GET " + b"/" * 70000):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", exporter.port), 30) as sock:
                sock.sendall(content)
                sock.recv(100)
        assert exporter.get("/healthz")[0] == 200
        for _ in range(50):
            silent.enter_context(socket.create_connection(("127.0.0.1", exporter.port), 30))
        trickling = threading.Event()
        trickle = threading.Thread(target=_trickle, args=(exporter.port, trickling))
        trickle.start()
        silent.callback(trickle.join)
        silent.callback(trickling.set)

        def answers() -> bool:
            with contextlib.suppress(OSError, http.client.HTTPException):
                return exporter.get("/healthz")[0] == 200
            time.sleep(0.5)
            return False

        wait_until(answers, timeout_s=60, what="an answer")


def _trickle(port: int, over: threading.Event) -> None:
    """Send requests that do not come to their end, a byte now and then."""
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(socket.create_connection(("127.0.0.1", port), 30)) for _ in range(32)]
        while not over.wait(1.0):
            for connection in connections:
                with contextlib.suppress(OSError):
                    connection.send(b"G")


def test_a_web_page_that_leads_its_name_here_is_told_nothing() -> None:
    """With a password a browser would not give it; without one, names of loopback addresses only are answered."""
    with ExporterServer(("::1", 0), lambda: {"jobs": [], "used_bytes": 0, "limit_bytes": 1}, password=None) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        port = server.server_address[1]
        for host in (f"[::1]:{port}", "127.0.0.1", f"LocalHost:{port}", "localhost:", "192.0.2.1:80"):
            assert status_of(("::1", port), Host=host) == 200, host
        for host in (
            f"evil.example:{port}", "localhost:80.evil.example", "[::1].evil.example", "[::1]evil.example:80", "[evil]",
            "127.0.0.1.evil.example", "127.0.0.1:80:80", "::1", "127.1", "localhost.evil.example", "localhost@evil", "",
        ):  # fmt: skip
            assert status_of(("::1", port), Host=host) == 403, host
        with socket.create_connection(("::1", port), 60) as sock:
            sock.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n")
            assert b" 403 " in sock.recv(100)
        server.shutdown()


def test_a_socket_for_both_versions_of_ip_knows_its_loopback_address() -> None:
    with ExporterServer(("::", 0), lambda: {"jobs": [], "used_bytes": 0, "limit_bytes": 1}, password=None) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = ("127.0.0.1", server.server_address[1])
        assert status_of(address, Host="evil.example") == 403
        assert status_of(address, Host="127.0.0.1") == 200
        server.shutdown()


def test_a_password_may_have_any_characters(tmp_path: Path) -> None:
    (tmp_path / "password").write_text("schlüssel-für-prometheus-✓\n")
    (tmp_path / "password").chmod(0o600)
    password = _password(tmp_path / "password")
    with ExporterServer(("127.0.0.1", 0), dict, password=password) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = ("127.0.0.1", server.server_address[1])
        # As curl and Prometheus send it.
        raw = password.encode().decode("latin-1")
        assert status_of(address, "/other", Authorization=f"Bearer {raw}") == 404
        assert status_of(address, "/other", Authorization=basic(password)) == 404
        assert status_of(address, "/other", Authorization=f"Bearer {raw}x") == 401
        server.shutdown()


def status_of(address: tuple[str, int], path: str = "/metrics", **headers: str) -> int:
    with contextlib.closing(http.client.HTTPConnection(*address, timeout=60)) as connection:
        connection.request("GET", path, headers=headers)
        return connection.getresponse().status


def test_who_has_no_password_costs_the_daemon_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """`/healthz` answers everybody, as often as they like, from what the daemon said last."""
    monkeypatch.setattr(server_module, "_HEALTH_S", 3600.0)
    asked = []

    def ask() -> dict[str, Any]:
        asked.append(time.monotonic())
        return {"jobs": []}

    with ExporterServer(("127.0.0.1", 0), ask, password=PASSWORD) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for path, code in [("/healthz", 200), ("/metrics", 401), ("/status.json", 401)] * 5:
            with contextlib.closing(http.client.HTTPConnection(*server.server_address, timeout=60)) as connection:
                connection.request("GET", path)
                assert connection.getresponse().status == code
        server.shutdown()
    assert len(asked) == 1


def test_a_thread_that_cannot_begin_keeps_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with ExporterServer(("127.0.0.1", 0), dict, password=None) as server:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            for _ in range(40):
                with pytest.raises(RuntimeError), socket.socket() as sock:
                    server.process_request(sock, None)
        assert server._room._value == 32  # type: ignore[attr-defined]


def test_counters_never_fall_and_begin_at_nothing() -> None:
    recoveries = Recoveries()
    before = recoveries.describe(1.0)
    assert before["kinds"]["worker_exit"] == before["phases_s"]["restore"] == 0
    told = {"event": "recovery", "run_id": "run", "kind": "worker_exit", "cause": "", "generation": 2, "complete": True}
    told |= {"steps_lost": 1, "unix_s": time.time() + 5}
    recoveries.see("a", {**told, "host": "a", "total_s": 2.0, "restore_s": 1.9})
    recoveries.see("b", {**told, "host": "b", "total_s": 2.1, "restore_s": 0.2, "spawn_s": 1.9})
    recoveries.see("c", {**told, "host": "c", "total_s": 9.0, "spawn_s": 9.0})
    found = recoveries.describe(1.0)
    assert (found["kinds"]["worker_exit"], found["down_s"]) == (1, 9.0)
    assert (found["phases_s"]["restore"], found["phases_s"]["spawn"]) == (1.9, 9.0)


def test_a_name_that_is_no_text_hides_nothing() -> None:
    assert _run({"run_id": "\udcff", "host": "a"}) == ("?", "a")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param([], "choose one of --password-file FILE", id="neither"),
        pytest.param(["--open", "--password-file", "{here}/good"], "choose one of", id="both"),
        pytest.param(["--open", "--listen", "here"], "'here' is not ADDRESS:PORT", id="address"),
        pytest.param(["--open", "--listen", "192.0.2.1:1"], "cannot listen on 192.0.2.1:1", id="foreign address"),
        pytest.param(["--open", "--certificate", "x"], "or neither", id="no private key"),
        pytest.param(["--open", "--certificate", "x", "--private-key", "y"], "cannot use certificate x", id="no file"),
        pytest.param(["--password-file", "{here}/none"], "cannot read {here}/none", id="no password"),
        pytest.param(["--password-file", "{here}/short"], "must have 16 printable characters", id="short"),
        pytest.param(["--password-file", "{here}/shared"], "is not private", id="others read it"),
    ],
)
def test_wrong_options_are_named(tmp_path: Path, options: list[str], message: str) -> None:
    for name, text, mode in (("good", PASSWORD, 0o600), ("short", "short", 0o600), ("shared", PASSWORD, 0o644)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(mode)
    arguments: list[Any] = ["--run-dir", tmp_path, "exporter", *(option.format(here=tmp_path) for option in options)]
    done = CliRunner().invoke(resilientctl, list(map(str, arguments)))
    assert done.exit_code in (1, 2)
    assert message.format(here=tmp_path) in " ".join(done.output.split())
