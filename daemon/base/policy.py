"""How a job wants to be watched, replicated, persisted and recovered: the sections of its configuration file.

Each section is a flat dataclass. A field's default is the product's default; its metadata says what values it may have.
A launcher reads the file (TOML, one table per section), checks it here, and sends it to the daemon with `open_job`.
"""

from dataclasses import dataclass, field

from resilient_run.ckpt.format.schedule import PACED

from .codec import SettingsRecord, limited

MOST_KEPT = 64
"""So many committed steps may stay in memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RootPolicy(SettingsRecord):
    """How failures are answered.

    Attributes:
        stalled_recoveries: Recoveries in a row that may pass without a newly committed step before the run ends.
        unhealthy_steps: Steps in a row that a rank may call unhealthy; then all ranks go back. 0: they never do.
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

    stalled_recoveries: int = limited(5, low=1)
    unhealthy_steps: int = limited(3, high=100)
    crash_loop_failures: int = limited(5, low=2)
    quarantine_failures: int = limited(3, low=1)
    quarantine_window_s: float = limited(1800.0, low=1)
    quarantine_cooldown_s: float = limited(1800.0, low=1)
    operator_command: str = ""
    release_command: str = ""
    slurm_script: str = ""
    operator_timeout_s: float = limited(600.0, low=1)
    standbys: int = limited(0, high=1000)
    standby_timeout_s: float = limited(1800.0, low=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicationPolicy(SettingsRecord):
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
        keep: How many committed steps stay in memory; all launchers of a run must agree on it.
        keep_every: Steps between those that are older than the newest.
    """

    transport: str = limited("daemon", choices=("daemon", "trainer"))
    scheme: str = limited("interleaved", choices=(*PACED, "unpaced", "blocking", "none"))
    profile_steps: int = limited(6, low=3, high=1000)
    sub_buffers: int = limited(4, low=1, high=64)
    sub_buffer_bytes: int = limited(32 << 20, low=4096, high=1 << 30)
    variance: float = limited(0.9, low=0.1, high=1)
    max_every: int = limited(1, low=1, high=64)
    bandwidth_mbit_s: float = 0.0
    keep: int = limited(1, low=1, high=MOST_KEPT)
    keep_every: int = limited(1, low=1)

    @property
    def in_flight(self) -> int:
        """Chunks that may really be on their way to a host at a time: several with pipelining only."""
        return 1 if self.scheme in ("no-pipeline", "naive") else self.sub_buffers

    @property
    def chunk_bytes(self) -> int:
        """The largest chunk really: with "naive" the whole buffer R, since it is not cut into sub-buffers."""
        return self.sub_buffer_bytes * (self.sub_buffers if self.scheme == "naive" else 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class DetectPolicy(SettingsRecord):
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
        straggler_factor: How many times as long as its peers a rank computes that is slow; up to 1, none is.
        straggler_replace_s: How long one may be slow before its host has failed, 0 for ever.
        corruption: What it leads to that ranks differ in bytes that they had in common: an observation, the end of the
            run, or the way back to the newest step on which all agreed.
    """

    hang_action: str = limited("restart", choices=("restart", "log"))
    hang_floor_s: float = limited(300.0, low=0.1)
    hang_factor: float = limited(3.0, low=1.0)
    hang_min_steps: int = limited(10, low=1)
    hang_busy_factor: float = limited(6.0, low=1.0)
    hang_start_s: float = limited(1800.0, low=0.1)
    sample_s: float = limited(5.0, low=0.1)
    memory_warn_percent: float = limited(5.0, high=100)
    memory_fail_percent: float = limited(0.0, high=100)
    swap_warn_percent: float = limited(50.0, high=100)
    swap_fail_percent: float = limited(0.0, high=100)
    disk_warn_percent: float = limited(5.0, high=100)
    disk_fail_percent: float = limited(0.0, high=100)
    tmpfs_warn_percent: float = limited(5.0, high=100)
    tmpfs_fail_percent: float = limited(0.0, high=100)
    load_warn: float = 8.0
    load_fail: float = 0.0
    gpu_broken: str = limited("fail", choices=("fail", "warn"))
    gpu_warn_celsius: float = 90.0
    gpu_fail_celsius: float = 0.0
    gpu_nvlink_warn_errors: int = 100
    gpu_nvlink_fail_errors: int = 0
    peer_unreachable_s: float = 15.0
    replication_lag_steps: int = 50
    straggler_factor: float = 1.2
    straggler_replace_s: float = 0.0
    corruption: str = limited("warn", choices=("warn", "stop", "rollback"))


@dataclass(frozen=True, kw_only=True, slots=True)
class PersistPolicy(SettingsRecord):
    """Which committed steps are also written to storage that outlives the hosts.

    Attributes:
        target: A directory or an fsspec URL that every host reaches; None writes nothing.
        every_steps: Steps after which the next one is written, 0 for no such rule.
        every_s: Seconds after which the next one is written, 0 for no such rule.
        keep: How many written steps are kept; older ones are deleted.
        level: zstandard's compression level.
        grace_s: Seconds that a daemon which is told to end takes to write the newest committed step, 0 for not at all.
    """

    target: str | None = None
    every_steps: int = 0
    every_s: float = 600.0
    keep: int = limited(3, low=1)
    level: int = limited(1, low=1, high=19)
    grace_s: float = 20.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy(SettingsRecord):
    """A job's configuration, one attribute per section; every section and every field may be left out."""

    root: RootPolicy = field(default_factory=RootPolicy)
    replication: ReplicationPolicy = field(default_factory=ReplicationPolicy)
    detect: DetectPolicy = field(default_factory=DetectPolicy)
    persist: PersistPolicy = field(default_factory=PersistPolicy)
