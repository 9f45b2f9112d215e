"""``resilient-run``: torchrun's command line, read by torch's own parser, and a few options of ours (``--rr-*``)."""

import argparse
import logging
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from types import FrameType
from typing import Any, NoReturn

import click
from torch.distributed import run as torchrun
from torch.distributed.argparse_util import check_env, env
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.run import parse_min_max_nnodes

from resilient_run import __version__
from resilient_run.ckpt.errors import CheckpointError, DaemonError
from resilient_run.ckpt.uncaught import held_back, is_held_back
from resilient_run.daemon.base.logs import log_formatter

from .api import installed
from .config import RunConfig, options
from .etcd_server import EmbeddedEtcd, EtcdServerError
from .rendezvous.rendezvous import leave_all
from .torch_options import refuse_unusable

log = logging.getLogger(__name__)

BACKEND = "etcd-v3"
"""The rendezvous backend that recovery needs."""

_SHELLS = ("bash", "zsh", "fish", "tcsh")
_COMPLETION_HELP = "Print a script for completion in this shell and exit; needs shtab."
EXITS = (
    (f"--rr-print-completion [{'|'.join(_SHELLS)}]", _COMPLETION_HELP),
    ("--rr-version", "Show the version and exit."),
)
"""Options, and what they do, that `launcher.config` does not have: nothing is launched with them."""


@record
def main(args: Sequence[str] | None = None) -> None:
    """Run ``resilient-run``; arguments, exceptions and exit codes are those of ``torch.distributed.run.main``.

    What resilient-run itself refuses is shown, and is a `SystemExit`.
    """
    command = ResilientRun()
    try:
        with (
            _logging_to_stderr(),
            command.make_context("resilient-run", list(sys.argv[1:] if args is None else args)) as context,
        ):
            command.invoke(context)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)


@contextmanager
def _logging_to_stderr() -> Iterator[None]:
    """Show our messages beside torch's, from the level that torch's launcher takes from LOGLEVEL."""
    handler = logging.StreamHandler()
    try:
        handler.setFormatter(log_formatter("resilient-run: %(message)s", os.environ))
    except DaemonError as error:
        raise click.ClickException(str(error)) from error
    logger = logging.getLogger("resilient_run")
    level = logger.level
    logger.setLevel(os.environ.get("LOGLEVEL", "WARNING"))
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


class ResilientRun(click.Command):
    """The command. torch's parser reads the line; our options in it go on to click.

    After `parse_args`, ``context.obj`` is the namespace of torch's parser and ``context.params`` has our options.
    """

    def __init__(self) -> None:
        super().__init__("resilient-run", params=options(), add_help_option=False)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Split `args`; everything from the script on is the script's.

        Raises:
            click.UsageError: What torch's parser or one of our options refuses.
        """
        ours: list[str] = []
        parser = self.torch_parser(ctx, ours)
        ctx.obj = parser.parse_args(args)
        return super().parse_args(ctx, ours)

    def invoke(self, ctx: click.Context) -> None:
        """Run the job."""
        refuse_unusable(ctx.obj)
        run(ctx.obj, RunConfig.from_params(ctx.params))

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        """Return what follows the command's name in the usage line."""
        return ["[OPTIONS]", "TRAINING_SCRIPT", "[ARGS]..."]

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write what the command does."""
        formatter.write_paragraph()
        formatter.write_text(
            "Start TRAINING_SCRIPT as torchrun does. A script that uses resilient_run.Checkpointer continues after a "
            "failure from checkpoints in memory, usually with at most one step lost."
        )

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write torch's options, then ours."""
        with formatter.section("Options of torchrun"):
            formatter.write_dl([_help_record(action) for action in torchrun.get_args_parser()._actions])
        with formatter.section("Options of resilient-run"):
            records = [record for param in self.params if (record := param.get_help_record(ctx))]
            formatter.write_dl([*records, *EXITS])

    def torch_parser(self, ctx: click.Context, ours: list[str]) -> argparse.ArgumentParser:
        """Return torch's parser with our options, whose occurrences it appends to `ours`."""
        parser = torchrun.get_args_parser()
        parser.prog = ctx.info_name or parser.prog
        # All of ours begin with --rr-, which no abbreviation of an option of torch's does.
        for option in self.params:
            assert isinstance(option, click.Option)
            for name in (*option.opts, *option.secondary_opts):
                added = parser.add_argument(name, action=_Forward, to=ours, nargs=0 if option.is_flag else None)
                # What completion shows; argparse has "%" for formats of its own.
                added.help = (option.help or "").replace("%", "%%")
                added.metavar = (option.metavar or option.type.name).upper()
        parser.add_argument("--rr-print-completion", action=_PrintCompletion, choices=_SHELLS, of=self)
        parser.add_argument("--rr-version", action="version", version=f"resilient-run {__version__}")
        parser.print_help = lambda file=None: click.echo(ctx.get_help())  # type: ignore[method-assign]
        parser.error = partial(_usage_error, ctx)  # type: ignore[method-assign]
        return parser


def run(args: argparse.Namespace, config: RunConfig) -> None:
    """Run the job that `args`, parsed by torch's parser, describe.

    Raises:
        click.ClickException: A single-node run needs an etcd, and there is none; or our rendezvous, daemon or
            `Checkpointer` cannot do what was asked, and says what to change.
        ChildFailedError: A worker failed, and restarting did not help.
    """
    with _prepared(args, config):
        try:
            torchrun.run(args)  # type: ignore[no-untyped-call]
        except ChildFailedError as error:
            if (text := held_back(error.failures)) is None:
                raise
            raise click.ClickException(text) from error
        except (RendezvousError, CheckpointError) as error:
            if args.rdzv_backend != BACKEND:
                raise
            raise click.ClickException(str(error)) from error


@contextmanager
def _prepared(args: argparse.Namespace, config: RunConfig) -> Iterator[None]:
    """Provide what the job needs beside torch; where torch would choose the rendezvous, choose ours in `args`."""
    if config.auto and not config.enabled:
        log.warning("--rr-auto protects nothing here: --rr-off keeps no checkpoints")
    elif config.auto and args.no_python:
        raise click.UsageError("--rr-auto needs a Python script, and --no-python runs none: omit one of the two")
    if not config.enabled:
        with installed(config):
            yield
        return
    if config.elastic_s is not None and len(set(parse_min_max_nnodes(args.nnodes))) == 1:
        log.warning(
            "--rr-elastic: --nnodes=%s is one number, so this run never goes on with fewer hosts, and may only be "
            "started again with another number of ranks; give --nnodes=MIN:MAX",
            args.nnodes,
        )
    # Read by the rendezvous, which torch makes from its own options.
    os.environ["RESILIENT_HOST_ID"], os.environ["RESILIENT_LABEL"] = config.host_id, config.label
    with _signals_unwind(args.signals_to_handle), ExitStack() as stack:
        if _is_single_node(args):
            args.rdzv_backend, args.rdzv_endpoint = BACKEND, stack.enter_context(_embedded_etcd())
            if args.standalone and args.rdzv_id != "none" and config.policy.persist.target:
                log.warning(
                    "--standalone replaces --rdzv-id=%s by a random id, so this run does not continue from "
                    "--rr-persist; omit --standalone to continue that run",
                    args.rdzv_id,
                )
            if args.standalone or args.rdzv_id == "none":
                args.rdzv_id = str(uuid.uuid4())
            args.standalone = False
            config = replace(config, ephemeral=True)
        elif args.rdzv_backend != BACKEND:
            if "," in args.rdzv_endpoint:
                raise click.UsageError(
                    f"--rdzv-endpoint={args.rdzv_endpoint} has several addresses, and --rdzv-backend="
                    f"{args.rdzv_backend} takes one: the members of an etcd need --rdzv-backend={BACKEND}"
                )
            log.warning(
                "rendezvous backend %s: this run keeps no checkpoints in memory%s; for them use "
                "--rdzv-backend=%s --rdzv-endpoint=<etcd host:port>",
                args.rdzv_backend,
                ", and --rr-auto protects nothing" if config.auto else "",
                BACKEND,
            )
        if args.rdzv_backend == "c10d":
            # torch's store outlives a restart of the workers, which then read keys of their predecessors.
            os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
        if args.rdzv_backend == BACKEND and args.log_dir is None and args.logs_specs is None:
            args.log_dir = stack.enter_context(_log_directory())
        stack.enter_context(installed(config))
        # While etcd is there: torch shuts no handler down that it has no agent for.
        stack.callback(leave_all)
        yield


def _is_single_node(args: argparse.Namespace) -> bool:
    """Tell whether torch would choose the rendezvous: the rule in `torch.distributed.run.run`."""
    if args.standalone:
        return True
    # A number in torch 2.11, None after it.
    no_port = args.master_port == torchrun.get_args_parser().get_default("master_port")
    unspecified = args.rdzv_backend == "static" and not args.rdzv_endpoint and no_port
    return unspecified and parse_min_max_nnodes(args.nnodes)[1] == 1


@contextmanager
def _embedded_etcd() -> Iterator[str]:
    try:
        with EmbeddedEtcd() as etcd:
            yield etcd.endpoint
    except EtcdServerError as error:
        raise click.ClickException(f"{error}; or run without recovery: --rr-off") from error


@contextmanager
def _log_directory() -> Iterator[str]:
    """Provide the directory that torch's launcher makes when none is asked for, and would leave; logs in it stay."""
    made = tempfile.mkdtemp(prefix="torchelastic_")
    try:
        yield made
    finally:
        for directory, _, files in os.walk(made, topdown=False):
            with suppress(OSError):
                if files == ["error.json"] and is_held_back(error := os.path.join(directory, *files)):
                    os.unlink(error)
                os.rmdir(directory)


class _EarlySignal(SignalException):
    """A signal that came before torch's agent handles signals, that is, before there are workers."""


@contextmanager
def _signals_unwind(names: str) -> Iterator[None]:
    """Let the signals `names` that end a process at once unwind the block first, then end it all the same.

    Once workers exist, torch's own handlers take over.
    """

    def unwind(number: int, frame: FrameType | None) -> NoReturn:
        raise _EarlySignal(f"got signal {number} before any worker was started", signal.Signals(number))

    numbers = [getattr(signal, name.strip(), None) for name in names.split(",")]
    handled = [number for number in numbers if number and signal.getsignal(number) is signal.SIG_DFL]
    try:
        for number in handled:
            signal.signal(number, unwind)
    except ValueError:
        handled = []  # Only the main thread may; elsewhere signals are its business.
    try:
        yield
    except _EarlySignal as early:
        signal.signal(early.sigval, signal.SIG_DFL)
        signal.raise_signal(early.sigval)
    finally:
        for number in handled:
            if signal.getsignal(number) is unwind:
                signal.signal(number, signal.SIG_DFL)


class _Forward(argparse.Action):
    """Append the option as click spells it to a list; leave the namespace alone."""

    def __init__(self, option_strings: Sequence[str], dest: str, to: list[str], nargs: int | None) -> None:
        super().__init__(option_strings, dest=argparse.SUPPRESS, nargs=nargs, default=argparse.SUPPRESS)
        self._to = to

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        name = self.option_strings[0]
        self._to.append(name if self.nargs == 0 else f"{name}={values}")


class _PrintCompletion(argparse.Action):
    """Print the script with which a shell completes the command line, as torchrun's own option does, and exit."""

    def __init__(self, option_strings: Sequence[str], dest: str, choices: Sequence[str], of: click.Command) -> None:
        super().__init__(
            option_strings, dest=argparse.SUPPRESS, metavar="SHELL", choices=choices, help=_COMPLETION_HELP
        )
        self._options = {name: param for param in of.params for name in param.opts}

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        try:
            import shtab
        except ImportError:
            parser.error(f"{option_string} needs shtab: pip install 'shtab>=1.8'")
        for action in parser._actions:
            option = self._options.get(action.option_strings[0]) if action.option_strings else None
            if action.dest in ("training_script", "training_script_args"):
                action.complete = shtab.FILE  # type: ignore[attr-defined]
            elif action.dest == "log_dir" or (isinstance(option, click.Option) and _is_directory(option)):
                action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
            elif option is not None and isinstance(option.type, click.Path):
                action.complete = shtab.FILE  # type: ignore[attr-defined]
        click.echo(shtab.complete(parser, values))
        parser.exit()


def _is_directory(option: click.Option) -> bool:
    return isinstance(option.type, click.Path) and not option.type.file_okay


def _usage_error(ctx: click.Context, message: str) -> NoReturn:
    raise click.UsageError(message, ctx)


def _help_record(action: argparse.Action) -> tuple[str, str]:
    """Return the two columns that describe one of torch's options."""
    name = ", ".join(action.option_strings) or action.dest.upper()
    if action.option_strings and action.nargs != 0:
        name += f" [{'|'.join(action.choices)}]" if action.choices else f" {action.dest.upper()}"
    text = (action.help or "").replace("%%", "%")
    if isinstance(action, (env, check_env)):
        text += f"  [env var: PET_{action.dest.upper()}]"
    return name, text
