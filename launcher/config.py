"""`RunConfig`: everything about a run that torch's own options do not say, resolved in one place."""

import errno
import os
import re
import socket
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import click

from resilient_run.ckpt.errors import DaemonError
from resilient_run.daemon.base.policy import PersistPolicy, Policy
from resilient_run.daemon.base.settings import Settings, find_settings
from resilient_run.daemon.base.spec import Finite, parse_ports, parse_size
from resilient_run.daemon.run.rounds import MAX_WORLD_SIZE
from resilient_run.daemon.trust.private import open_to_append
from resilient_run.daemon.trust.secret import check_url, find_key

_SOCKET_PATH_MAX_BYTES = 107


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """How one launcher runs its part of a job.

    Attributes:
        run_dir: Directory of the daemon's socket, lock and log.
        shm_dir: tmpfs directory of the slots.
        host_id: Stable name of this host.
        label: Failure domain of this host (rack, switch), "" when unknown.
        replicas: Hosts that keep each rank's state, its own included (m in Gemini, section 6.4).
        memory_limit_bytes: What the slots of this host may take; None leaves it to the daemon.
        warm_workers: Fork workers from a process that has torch imported.
        preload: Modules that it imports besides; None learns them from the first workers.
        events_path: JSON Lines file that recovery events are appended to, or None.
        stop_timeout_s: Grace between SIGTERM and SIGKILL for workers whose generation is broken.
        enabled: False runs as torchrun does, without daemon and etcd.
        auto: Protect frameworks' trainers in a script that does not ask for it.
        policy: How the job is watched, replicated, persisted and recovered (`--rr-config`).
        allow_injection: `resilient-inject` may act on this host.
        allow_different_script: Join a run of another user, script, arguments or torch all the same.
        run_key: The secret of the run's hosts, None where the one in etcd has to do.
        ports: Where this host's daemon may listen for those of the others, None for a port that the kernel chooses.
        insecure: The run may have several hosts, an etcd that everybody reaches, and no run key.
        elastic_s: How long a run waits for a host before it goes on with fewer ranks; None: it keeps their number.
        sizes: The numbers of ranks that it may have then, none for any.
        ephemeral: Nobody can ask for this run again, so its slots are of no use after it.
    """

    run_dir: Path
    shm_dir: Path
    host_id: str
    label: str = ""
    replicas: int = 2
    memory_limit_bytes: int | None = None
    warm_workers: bool = True
    preload: tuple[str, ...] | None = ()
    events_path: Path | None = None
    stop_timeout_s: int = 5
    enabled: bool = True
    auto: bool = False
    policy: Policy = field(default_factory=Policy)
    allow_injection: bool = False
    run_key: str | None = field(default=None, repr=False)
    ports: range | None = None
    insecure: bool = False
    allow_different_script: bool = False
    elastic_s: float | None = None
    sizes: tuple[int, ...] = ()
    ephemeral: bool = False

    @classmethod
    def from_params(cls, params: Mapping[str, Any]) -> Self:
        """Return the configuration that the values of `options` by parameter name describe.

        Raises:
            click.BadParameter: A directory does not fit in a socket address, or the run key cannot be used.
        """
        settings = find_settings(os.environ, run_dir=params["rr_run_dir"], shm_dir=params["rr_shm_dir"])
        for path, option in ((settings.socket_path, "--rr-run-dir"), (settings.vault_socket_path, "--rr-shm-dir")):
            if len(os.fsencode(path)) > _SOCKET_PATH_MAX_BYTES:
                raise click.BadParameter(
                    f"{path.parent} is too long for the socket in it: choose a path of at most "
                    f"{_SOCKET_PATH_MAX_BYTES - len(path.name) - 1} bytes",
                    param_hint=option,
                )
        if params["rr_sizes"] and params["rr_elastic"] is None:
            why = "it needs --rr-elastic SECONDS: without it, the number of ranks is fixed"
            raise click.BadParameter(why, param_hint="--rr-sizes")
        return cls(
            run_dir=settings.run_dir,
            shm_dir=settings.shm_dir,
            host_id=params["rr_host_id"],
            label=params["rr_label"],
            replicas=params["rr_replicas"],
            memory_limit_bytes=params["rr_memory"],
            warm_workers=params["rr_warm_workers"],
            preload=params["rr_preload"],
            events_path=params["rr_events"],
            stop_timeout_s=params["rr_stop_timeout"],
            enabled=not params["rr_off"],
            auto=params["rr_auto"],
            policy=_with_persist_target(params["rr_config"], params["rr_persist"]),
            allow_injection=params["rr_allow_injection"],
            run_key=_find_key(params["rr_key_file"]),
            ports=params["rr_port"],
            insecure=params["rr_insecure"],
            allow_different_script=params["rr_allow_different_script"],
            elastic_s=params["rr_elastic"],
            sizes=params["rr_sizes"],
        )

    @property
    def settings(self) -> Settings:
        """The daemon's directories."""
        return Settings(run_dir=self.run_dir, shm_dir=self.shm_dir)

    @classmethod
    def from_environ(cls) -> Self:
        """Return the configuration of a run without a command line: environment, then defaults.

        Raises:
            click.UsageError: A variable has a value that its option would not take.
        """
        command = click.Command("resilient-run", params=options(), add_help_option=False)
        return cls.from_params(command.make_context("resilient-run", []).params)


def options() -> list[click.Parameter]:
    """Return our command-line options; torch's are `torch.distributed.run.get_args_parser`'s."""
    return [
        _option(
            "--rr-run-dir",
            type=click.Path(file_okay=False, readable=False, path_type=Path),
            help="Directory of the daemon's socket. Default: /run/resilientd/<user> if a service serves there, else "
            "your $XDG_RUNTIME_DIR/resilient-run, else /tmp/resilient-run-<uid>.",
        ),
        _option(
            "--rr-shm-dir",
            type=click.Path(file_okay=False, readable=False, path_type=Path),
            help="tmpfs directory of the checkpoints. Default: /dev/shm/resilient-run-<uid>.",
        ),
        _option(
            "--rr-host-id",
            metavar="NAME",
            callback=_check_host_id,
            default=socket.gethostname,
            help="Stable, unique name of this host. Default: the host name.",
        ),
        _option(
            "--rr-label",
            metavar="NAME",
            callback=_check_label,
            default="",
            help="Failure domain of this host, for example its rack: replicas go to hosts with other labels. "
            "Default: none.",
        ),
        _option(
            "--rr-replicas",
            type=click.IntRange(min=1),
            default=2,
            show_default=True,
            help="Hosts that hold each rank's checkpoint, its own host included.",
        ),
        _option(
            "--rr-memory",
            metavar="SIZE",
            callback=parse_size,
            help="Memory for checkpoints on this host, as 8G or 512MiB. Default: the daemon's --memory-limit.",
        ),
        _option(
            "--rr-warm-workers/--rr-no-warm-workers",
            default=True,
            show_default=True,
            help="Fork workers from a process that has already imported torch.",
        ),
        _option(
            "--rr-preload",
            metavar="MODULES",
            callback=_parse_modules,
            help="Modules that this process imports too, as lightning,transformers; learn: the installed packages that "
            "the first workers import. Default: none.",
        ),
        _option(
            "--rr-events",
            type=click.Path(dir_okay=False, writable=True, path_type=Path),
            callback=_check_events,
            help="Append recovery events to this file, one JSON object per line.",
        ),
        _option(
            "--rr-stop-timeout",
            metavar="SECONDS",
            type=click.IntRange(min=1),
            default=5,
            show_default=True,
            help="After a failure, time for the other workers to leave `loop()`, and between SIGTERM and SIGKILL; "
            "after a hang none.",
        ),
        _option(
            "--rr-config",
            type=click.Path(dir_okay=False, exists=True, path_type=Path),
            callback=_read_policy,
            help="Configuration file (TOML); docs/operations/configuration.md lists its settings.",
        ),
        _option(
            "--rr-allow-injection",
            is_flag=True,
            help="Let resilient-inject break this run on purpose on this host.",
        ),
        _option(
            "--rr-allow-different-script",
            is_flag=True,
            help="Join a run whose launchers have another script, arguments, user or torch.",
        ),
        _option(
            "--rr-elastic",
            metavar="SECONDS",
            type=Finite(min=0),
            help="With --nnodes MIN:MAX: wait this long for a lost host, then shrink; grow at most this often. "
            "Default: keep the number of ranks.",
        ),
        _option(
            "--rr-sizes",
            metavar="N,…",
            callback=_parse_sizes,
            default="",
            help="With --rr-elastic: the allowed numbers of ranks, as 2,4,8. Default: any.",
        ),
        _option(
            "--rr-persist",
            metavar="URL",
            callback=check_url,
            help="Also write committed steps to this directory or fsspec URL, which every host reaches "
            "(persist.target in the configuration file).",
        ),
        _option(
            "--rr-key-file",
            type=click.Path(dir_okay=False, path_type=Path),
            help="File with the run key (resilientctl keygen), the same on all hosts; RESILIENT_KEY may hold the key "
            "itself. Default: a secret in etcd.",
        ),
        _option(
            "--rr-insecure",
            is_flag=True,
            help="Run on several hosts without a run key although anybody may write to etcd.",
        ),
        _option(
            "--rr-port",
            metavar="PORT|FIRST-LAST",
            callback=parse_ports,
            help="Port, or range of ports, on which this host's daemon listens for the others. Default: any free one.",
        ),
        _option(
            "--rr-auto",
            is_flag=True,
            help="Protect an unchanged script whose loop is the Trainer of transformers or Lightning; run others as "
            "torchrun does, and say why.",
        ),
        _option(
            "--rr-off",
            is_flag=True,
            help="Run exactly as torchrun: no daemon, no etcd, no recovery from memory.",
        ),
    ]


def _option(names: str, **settings: Any) -> click.Option:
    """Return an option, which a variable may say as well: RESILIENT_RUN_DIR what --rr-run-dir does."""
    name = names.partition("/")[0].removeprefix("--rr-")
    return click.Option([names], envvar=f"RESILIENT_{name.replace('-', '_').upper()}", **settings)


def _check_label(ctx: click.Context, param: click.Parameter, value: str) -> str:
    return value and _check_host_id(ctx, param, value)


def _check_host_id(ctx: click.Context, param: click.Parameter, value: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9._:-]+", value):
        raise click.BadParameter(f"{value!r} must consist of letters, digits and the characters . _ : -", ctx, param)
    return value


def _parse_modules(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[str, ...] | None:
    """Return the modules that `value` names, None to learn them."""
    if value == "learn":
        return None
    if value is None or value == "none":
        return ()
    modules = tuple(name.strip() for name in value.split(","))
    for name in modules:
        if not all(part.isidentifier() for part in name.split(".")):
            raise click.BadParameter(
                f"{name!r} is not a module name: write names separated by commas, such as "
                "lightning,transformers, or learn",
                ctx,
                param,
            )
    return modules


def _parse_sizes(ctx: click.Context, param: click.Parameter, value: str) -> tuple[int, ...]:
    sizes = [size.strip() for size in value.split(",") if size.strip()]
    if not all(size.isdecimal() and 0 < int(size) <= MAX_WORLD_SIZE for size in sizes):
        raise click.BadParameter(f"{value!r} must be numbers of ranks separated by commas, such as 2,4,8", ctx, param)
    return tuple(sorted({int(size) for size in sizes}))


def _find_key(path: Path | None) -> str | None:
    try:
        return find_key(path, os.environ)
    except DaemonError as error:
        raise click.BadParameter(str(error), param_hint="--rr-key-file") from error


def _read_policy(ctx: click.Context, param: click.Parameter, value: Path | None) -> Policy:
    """Return the policy in the configuration file `value`."""
    if value is None:
        return Policy()
    try:
        return Policy.parse(tomllib.loads(value.read_text()), "configuration")
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, DaemonError) as error:
        raise click.BadParameter(f"{value}: {error}", ctx, param) from error


def _with_persist_target(policy: Policy, target: str | None) -> Policy:
    """Return `policy` with `target`, if given, as its persistent tier; a path is made absolute."""
    target = target or policy.persist.target
    if target is not None and "://" not in target and "::" not in target:
        target = str(Path(target).absolute())
    try:
        persist = PersistPolicy.parse({**policy.persist.to_value(), "target": target}, "configuration, persist")
    except DaemonError as error:
        raise click.BadParameter(str(error), param_hint="--rr-persist") from error
    return replace(policy, persist=persist)


def _check_events(ctx: click.Context, param: click.Parameter, value: Path | None) -> Path | None:
    if value is None:
        return None
    if not value.parent.is_dir():
        raise click.BadParameter(f"{value.parent} is not a directory: create it, or choose another file", ctx, param)
    try:
        if os.path.lexists(value):
            os.close(open_to_append(value))
    except DaemonError as error:
        raise click.BadParameter(f"{error}: remove it, or choose another file", ctx, param) from error
    except OSError as error:
        # A pipe may get its reader later.
        if error.errno != errno.ENXIO:
            raise click.BadParameter(f"{value}: {error.strerror}", ctx, param) from error
    return value.absolute()
