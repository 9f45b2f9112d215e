"""How a job wants to be watched, replicated, persisted and recovered: the sections of its configuration file.

Each section is a flat dataclass. A field's default is the product's default; its metadata says what values it may have.
A launcher reads the file (TOML, one table per section), checks it here, and sends it to the daemon with `open_job`.
"""

import difflib
from collections.abc import Mapping
from dataclasses import Field, asdict, dataclass, field, fields
from typing import Any, Self

from resilient_run.ckpt.errors import DaemonError
from resilient_run.ckpt.format.schedule import PACED


def setting(default: Any, *, low: float | None = None, high: float | None = None, choices: tuple[str, ...] = ()) -> Any:
    """Return a dataclass field with its default and the values it may have."""
    return field(default=default, metadata={"low": low, "high": high, "choices": choices})


@dataclass(frozen=True, kw_only=True, slots=True)
class RootPolicy:
    """How failures are answered.

    Attributes:
        stalled_recoveries: Recoveries in a row that may pass without a newly committed step before the run ends.
        crash_loop_failures: Times that the same failure may stop training at about the same step; then the run ends.
        quarantine_failures: Failures of one host within the window that put it into quarantine.
        quarantine_window_s: How long a failure counts, seconds.
        quarantine_cooldown_s: How long a quarantine lasts, seconds.
        operator_command: Runs once per host that needs a replacement; "" waits for a standby.
        release_command: Runs once per host that is given back; "" gives none back.
        slurm_script: Submitted to Slurm once per host that is asked for, in the place of both commands.
        operator_timeout_s: How long one of these commands may take, seconds.
        standbys: Hosts to be held ready beside those that train; the operator is asked for those that are missing.
        standby_timeout_s: How long a host may take to come before the operator is asked for another one, seconds.
    """

    stalled_recoveries: int = setting(5, low=1)
    crash_loop_failures: int = setting(5, low=2)
    quarantine_failures: int = setting(3, low=1)
    quarantine_window_s: float = setting(1800.0, low=1)
    quarantine_cooldown_s: float = setting(1800.0, low=1)
    operator_command: str = setting("")
    release_command: str = setting("")
    slurm_script: str = setting("")
    operator_timeout_s: float = setting(600.0, low=1)
    standbys: int = setting(0, low=0, high=1000)
    standby_timeout_s: float = setting(1800.0, low=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicationPolicy:
    """How replicas travel to the placement peers (Gemini, Section 6.5).

    Attributes:
        transport: "daemon" moves them between daemons over TCP, "trainer" between trainers over torch.distributed.
        scheme: When they travel: as in Figure 6.16 ("naive": one chunk fills an idle span), or "unpaced", at once and
            regardless of training. "none" makes no checkpoints at all.
        profile_steps: Iterations at the beginning in which the idle spans of the network are learned.
        sub_buffers: Chunks that may be on their way to a host at a time, p.
        sub_buffer_bytes: The largest chunk, R / p; between daemons never more than 4 MiB.
        variance: Part of each idle span that is used, mu, because spans vary.
        max_every: How many iterations the replicas of one checkpoint may take where they do not fit in one; a failure
            then loses as many steps.
        bandwidth_mbit_s: What a host can send, 0 to measure it.
    """

    transport: str = setting("daemon", choices=("daemon", "trainer"))
    scheme: str = setting("interleaved", choices=(*PACED, "unpaced", "blocking", "none"))
    profile_steps: int = setting(6, low=3, high=1000)
    sub_buffers: int = setting(4, low=1, high=64)
    sub_buffer_bytes: int = setting(32 << 20, low=4096, high=1 << 30)
    variance: float = setting(0.9, low=0.1, high=1)
    max_every: int = setting(1, low=1, high=64)
    bandwidth_mbit_s: float = setting(0.0, low=0)

    @property
    def in_flight(self) -> int:
        """Chunks that may really be on their way to a host at a time: several with pipelining only."""
        return 1 if self.scheme in ("no-pipeline", "naive") else self.sub_buffers

    @property
    def chunk_bytes(self) -> int:
        """The largest chunk really: with "naive" the whole buffer R, since it is not cut into sub-buffers."""
        return self.sub_buffer_bytes * (self.sub_buffers if self.scheme == "naive" else 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class DetectPolicy:
    """When something counts as wrong. A threshold of 0 is switched off.

    Attributes:
        hang_action: What a hang leads to: a restart of the workers, or a line in the log.
        hang_floor_s: A rank without a step for less than this never counts as hung: longer than validation takes.
        hang_factor: It counts as hung after this many times the longest step of the generation.
        hang_min_steps: Steps of a generation after which that is known well enough.
        hang_busy_factor: How many times longer the limit is for a rank whose processes take CPU time.
        hang_start_s: The limit until then, and for the first step.
        sample_s: How often the host is measured.
        memory_warn_percent: Memory that should be available; below `memory_fail_percent` the host has failed.
        swap_warn_percent: Swap that may be in use.
        disk_warn_percent: Room that the file systems of the run directory and the persistent tier should have.
        tmpfs_warn_percent: Room that the tmpfs of the slots should have.
        load_warn: Processes per CPU that may want to run, averaged over a minute.
        gpu_broken: What a critical XID, an uncorrectable memory error or a lost GPU counts as.
        gpu_warn_celsius: Temperature that a GPU should not reach.
        gpu_nvlink_warn_errors: NVLink errors that a GPU should not have during the job.
        peer_unreachable_s: How long the daemon of a placement peer may be silent while etcd has it registered.
        replication_lag_steps: Steps that commits may be behind training.
        corruption: What it leads to that ranks differ in bytes that they had in common: an observation, the end of the
            run, or the way back to the newest step on which all agreed.
    """

    hang_action: str = setting("restart", choices=("restart", "log"))
    hang_floor_s: float = setting(300.0, low=0.1)
    hang_factor: float = setting(3.0, low=1.0)
    hang_min_steps: int = setting(10, low=1)
    hang_busy_factor: float = setting(6.0, low=1.0)
    hang_start_s: float = setting(1800.0, low=0.1)
    sample_s: float = setting(5.0, low=0.1)
    memory_warn_percent: float = setting(5.0, low=0, high=100)
    memory_fail_percent: float = setting(0.0, low=0, high=100)
    swap_warn_percent: float = setting(50.0, low=0, high=100)
    swap_fail_percent: float = setting(0.0, low=0, high=100)
    disk_warn_percent: float = setting(5.0, low=0, high=100)
    disk_fail_percent: float = setting(0.0, low=0, high=100)
    tmpfs_warn_percent: float = setting(5.0, low=0, high=100)
    tmpfs_fail_percent: float = setting(0.0, low=0, high=100)
    load_warn: float = setting(8.0, low=0)
    load_fail: float = setting(0.0, low=0)
    gpu_broken: str = setting("fail", choices=("fail", "warn"))
    gpu_warn_celsius: float = setting(90.0, low=0)
    gpu_fail_celsius: float = setting(0.0, low=0)
    gpu_nvlink_warn_errors: int = setting(100, low=0)
    gpu_nvlink_fail_errors: int = setting(0, low=0)
    peer_unreachable_s: float = setting(15.0, low=0)
    replication_lag_steps: int = setting(50, low=0)
    corruption: str = setting("warn", choices=("warn", "stop", "rollback"))


@dataclass(frozen=True, kw_only=True, slots=True)
class PersistPolicy:
    """Which committed steps are also written to storage that outlives the hosts.

    Attributes:
        target: A directory or an fsspec URL that every host reaches; None writes nothing.
        every_steps: Steps after which the next one is written, 0 for no such rule.
        every_s: Seconds after which the next one is written, 0 for no such rule.
        keep: How many written steps are kept; older ones are deleted.
        level: zstandard's compression level.
        grace_s: Seconds that a daemon which is told to end takes to write the newest committed step, 0 for not at all.
    """

    target: str | None = setting(None)
    every_steps: int = setting(0, low=0)
    every_s: float = setting(600.0, low=0)
    keep: int = setting(3, low=1)
    level: int = setting(1, low=1, high=19)
    grace_s: float = setting(20.0, low=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """A job's configuration, one attribute per section; every section and every field may be left out."""

    root: RootPolicy = field(default_factory=RootPolicy)
    replication: ReplicationPolicy = field(default_factory=ReplicationPolicy)
    detect: DetectPolicy = field(default_factory=DetectPolicy)
    persist: PersistPolicy = field(default_factory=PersistPolicy)

    @classmethod
    def parse(cls, tables: Mapping[str, Any]) -> Self:
        """Return the policy that `tables` (section → field → value) describes.

        Raises:
            DaemonError: A section or field is unknown, or a value is not of its type or range.
        """
        known = {section.name: section for section in fields(cls)}
        for name in tables:
            if name not in known:
                raise DaemonError(f"configuration: no section {name!r}{_did_you_mean(name, known)}")
        sections: dict[str, Any] = {
            name: parse_settings(section.type, name, tables.get(name, {}), where="configuration")
            for name, section in known.items()
        }
        return cls(**sections)

    def to_dict(self) -> dict[str, Any]:
        """Return what `parse` reads."""
        return asdict(self)


def parse_settings(kind: Any, section: str, table: Any, *, where: str) -> Any:
    """Return the dataclass `kind`, whose fields are made by `setting`, with the values of `table`.

    Args:
        kind: The dataclass.
        section: Name of the table.
        table: Field → value; what it does not say has its default.
        where: What the table is part of, for the error text.

    Raises:
        DaemonError: A field is unknown, or a value is not of its type or range.
    """
    if not isinstance(table, Mapping):
        raise DaemonError(f"{where}: {section!r} is {table!r}, not a table of settings")
    known = {item.name: item for item in fields(kind)}
    for name in table:
        if name not in known:
            raise DaemonError(f"{where}: no setting {section}.{name}{_did_you_mean(name, known)}")
    return kind(**{name: _check(f"{where}: {section}.{name}", known[name], value) for name, value in table.items()})


def _check(where: str, item: Field[Any], value: Any) -> Any:
    """Return `value` if the setting may have it; its default says the type, None stands for "not set"."""
    if value == item.default and type(value) is type(item.default):
        return value
    low, high, choices = item.metadata["low"], item.metadata["high"], item.metadata["choices"]
    number = low is not None or high is not None
    if choices:
        good, wanted = value in choices, f"one of {', '.join(choices)}"
    elif isinstance(item.default, bool):
        good, wanted = isinstance(value, bool), "true or false"
    elif number:
        whole = isinstance(item.default, int)
        good = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
        good = good and (low is None or value >= low) and (high is None or value <= high)
        bounds = f"of at least {low:g}" if high is None else f"from {low:g} to {high:g}"
        wanted = f"{'an integer' if whole else 'a number'} {bounds}"
    else:
        good, wanted = isinstance(value, str) and value.isprintable() and 0 < len(value) <= 4096, "a text"
    if not good:
        raise DaemonError(f"{where} is {value!r}; it must be {wanted}")
    return float(value) if number and isinstance(item.default, float) else value


def _did_you_mean(name: str, known: Mapping[str, object]) -> str:
    close = difflib.get_close_matches(str(name), known, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; there are: {', '.join(known) or 'none'}"
