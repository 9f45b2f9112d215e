"""The daemon's answer to `status` as metrics of the OpenMetrics format."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.openmetrics.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

CONTENT_TYPE: Final = CONTENT_TYPE_LATEST
_RUN: Final = ("run_id", "host")

Job = Mapping[str, Any]
Rows = Iterable[tuple[tuple[str, ...], float | None]]


def exposition(status: Mapping[str, Any] | None) -> bytes:
    """Return what `/metrics` answers.

    Args:
        status: The answer of the daemon, None when it gave none.
    """
    registry = CollectorRegistry()
    registry.register(_Status(status))
    return bytes(generate_latest(registry))  # type: ignore[no-untyped-call]


class _Status(Collector):
    def __init__(self, status: Mapping[str, Any] | None) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        status = self._status
        yield _gauge("up", "Whether the daemon of this host answers.", (), [((), float(status is not None))])
        if status is None:
            return
        for name, help_ in (("used", "Memory that all slots take."), ("limit", "Memory that slots may take.")):
            yield _gauge(f"slots_{name}_bytes", help_, (), [((), status[f"{name}_bytes"])])
        jobs = [job for job in status["jobs"] if "generation" in job]
        for name, help_, value in _GAUGES:
            yield _gauge(name, help_, _RUN, ((_run(job), value(job)) for job in jobs))
        for name, help_, value in _COUNTERS:
            yield _counter(name, help_, _RUN, ((_run(job), value(job)) for job in jobs))
        for name, help_, label, rows in _LABELLED:
            yield _counter(
                name, help_, (*_RUN, label), [((*_run(job), key), value) for job in jobs for key, value in rows(job)]
            )
        yield _gauge(
            "observations",
            "What is wrong on this host now, by kind and severity (info, warn, fail).",
            (*_RUN, "kind", "severity"),
            [((*_run(job), kind, severity), number) for job in jobs for (kind, severity), number in _observed(job)],
        )


def _run(job: Job) -> tuple[str, str]:
    # A name may have what is no text, and must not hide the other runs.
    run_id, host = (str(job[name]).encode(errors="replace").decode() for name in ("run_id", "host"))
    return run_id, host


def _step(job: Job) -> float | None:
    return max(job["last_steps"].values(), default=None)


def _committed(job: Job) -> float | None:
    return None if job["watermark"] is None else job["watermark"]["step"]


def _observed(job: Job) -> Iterable[tuple[tuple[str, str], int]]:
    found: dict[tuple[str, str], int] = {}
    for seen in job["observations"]:
        place = str(seen["kind"]), str(seen["severity"])
        found[place] = found.get(place, 0) + 1
    return found.items()


_GAUGES: Final[tuple[tuple[str, str, Callable[[Job], float | None]], ...]] = (
    ("failed", "Whether this host's daemon has given the run up.", lambda job: job["failure"] is not None),
    ("generation", "Number of the current generation; each recovery begins another.", lambda job: job["generation"]),
    ("world_size_ranks", "Ranks of the current generation.", lambda job: job["world_size"]),
    ("attached_ranks", "Ranks of this host that have a Checkpointer.", lambda job: len(job["attached_ranks"])),
    ("step", "Newest step that a rank of this host has completed.", _step),
    ("committed_step", "Newest step that is committed.", _committed),
    ("steps_at_risk", "Steps that a failure would cost now.", lambda job: job["protection"]["steps_at_risk"]),
    ("protected", "Whether commits keep up with training.", lambda job: job["protection"]["protected"]),
    ("capture_every_steps", "Of so many steps one is captured.", lambda job: job["replication"]["every"]),
    ("replica_hosts", "Hosts that keep the replicas of this host's ranks.", lambda job: len(job["holders"])),
    ("slots_bytes", "Memory that the run's slots take here.", lambda job: job["bytes"]),
    ("step_seconds", "Median time of a training step.", lambda job: job["replication"]["iteration_s"]),
    ("etcd_silent_seconds", "Since when etcd has not confirmed this host's lease.", lambda job: job["etcd_silent_s"]),
    ("etcd_answer_seconds", "How long etcd took to do so last.", lambda job: job["etcd_answered_in_s"]),
    ("quarantined_hosts", "Hosts that the run avoids.", lambda job: len(job["root"]["quarantines"])),
    (
        "effective_training_ratio",
        "Share of the time since this daemon knows the run that made lasting progress.",
        lambda job: job["goodput"]["effective_ratio"],
    ),
)
_COUNTERS: Final[tuple[tuple[str, str, Callable[[Job], float]], ...]] = (
    ("commits", "Commits that this host has heard of.", lambda job: job["commits"]),
    (
        "missed_captures",
        "Captures that a rank of this host has missed.",
        lambda job: job["protection"]["missed_captures"],
    ),
    ("received_bytes", "Replicas that came from other hosts or storage.", lambda job: job["received_bytes"]),
    ("down_seconds", "Time without training, of all failures together.", lambda job: job["goodput"]["down_s"]),
    ("lost_steps", "Steps that were trained again after failures.", lambda job: job["goodput"]["steps_lost"]),
)
_LABELLED: Final[tuple[tuple[str, str, str, Callable[[Job], Iterable[tuple[str, float]]]], ...]] = (
    ("recoveries", "Failures that the run recovered from.", "kind", lambda job: job["goodput"]["kinds"].items()),
    (
        "recovery_seconds",
        "Time that recoveries took on the slowest host, by phase.",
        "phase",
        lambda job: job["goodput"]["phases_s"].items(),
    ),
)


def _gauge(name: str, help_: str, labels: tuple[str, ...], rows: Rows) -> Metric:
    return _filled(GaugeMetricFamily(f"resilient_{name}", help_, labels=labels), rows)


def _counter(name: str, help_: str, labels: tuple[str, ...], rows: Rows) -> Metric:
    return _filled(CounterMetricFamily(f"resilient_{name}", help_, labels=labels), rows)


def _filled(family: GaugeMetricFamily | CounterMetricFamily, rows: Rows) -> Metric:
    for labels, value in rows:
        if value is not None:
            family.add_metric(labels, float(value))
    return family
