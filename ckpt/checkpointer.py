"""The trainer's side of resilient-run, in three calls: `Checkpointer(…)`, `restore()`, and `step()` after each step."""

import atexit
import functools
import operator
import os
import sys
import time
import traceback
import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, NoReturn, Self

import torch
import xxhash
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from .capture.capture import Capturer, one_bool
from .capture.injected import Injected
from .capture.protection import Protection
from .capture.stats import CaptureStats
from .errors import CheckpointError, DaemonError, RestoreError, StateError, TopologyError
from .foreign import foreign
from .format.manifest import Manifest, parse
from .format.pair import Pair, is_import, read_pair
from .format.slot import Slot, SlotHeader
from .format.wire import Message
from .link.env import TrainerEnv
from .link.link import Link
from .link.pulse import Pulse
from .state.held import Accumulation, Unregistered
from .state.state import TrainingState, due_rng
from .transport.edge import EdgeConfig
from .transport.exchange import Exchange, ExchangeStats
from .transport.pace import TrainerPace
from .uncaught import install as show_refusals
from .uncaught import refusal

_ATTACH_S: Final = 120.0
_RESTORE_S: Final = 1800.0
_MAX_TEXT: Final = 1 << 12

_open: dict[int, "Checkpointer"] = {}
"""The one that is open in the process with a pid; a fork has its parent's, which says nothing."""
_begun: set[TrainerEnv | None] = set()
"""Ranks, in a generation of a run, of which this process has closed a Checkpointer that was at work."""


class Checkpointer:
    """Keeps the training state of this rank in the memory of its hosts, after every step.

    Example:
        ```
        with Checkpointer(model=model, optimizer=optimizer, epoch=0) as ckpt:
            for n in range(ckpt.restore(), steps):
                train_one_step()
                ckpt.step(n + 1)
        ```

    Values on the CPU may change at any time. On GPUs, parameters should only be read between `step()` and the next
    step of a torch optimizer, or that capture is discarded. Without a daemon (plain `python` or `torchrun`) a warning
    says that nothing is kept, and `restore()` returns 0.

    Make one per process: a second one keeps nothing and warns. Register the objects of all phases of a script with
    one, or give each phase a run id.
    """

    def __init__(self, *, rng: bool = True, **objects: Any) -> None:
        """Attach to the daemon of this host.

        Args:
            rng: Whether the random number generators of Python, numpy and torch are part of the state.
            objects: By name, objects with `state_dict` and `load_state_dict`, lists, tuples and dicts of them
                (`optimizers=[g, d]` become "optimizers.0" and "optimizers.1"; a None is skipped), and plain values
                (numbers, strings, tensors, arrays, and containers of them).

        Raises:
            StateError: The state holds something that cannot be captured, or lacks what an optimizer trains.
            MemoryBudgetError: The captures of this state that stay do not fit in the memory budget of the host.
            DaemonError: The daemon refused, or this is not the first generation and there is no daemon.
        """
        show_refusals()
        self._state = TrainingState(objects, rng=rng)
        self._unregistered = Unregistered(lambda: self._state.objects)
        self._accumulation = Accumulation()
        self._step = self._topology = 0
        self._plan: Pair | None = None
        self._made_by, self._reshapes, self._unhealthy = 0, False, frozenset[int]()
        self._pid = os.getpid()
        self._restored = self._closed = self._warned = self._looked = False
        self._told: set[str] = set()
        self._knows_plan = self._knows_world = False
        self._env = TrainerEnv.from_environ(os.environ)
        self._link: Link | None = None
        self._capturer: Capturer | None = None
        self._exchange: Exchange | None = None
        self._pace: TrainerPace | None = None
        self._pulse: Pulse | None = None
        self._is_on_cpu = False
        self._hooks: tuple[RemovableHandle, ...] = ()
        self._injected = Injected()
        if self._env is None:
            warnings.warn(
                "no checkpoints are kept: this process was not started by resilient-run. "
                "Start it with `resilient-run` in place of `torchrun` or `python`",
                RuntimeWarning,
                stacklevel=2,
            )
        else:
            self._attach(self._env)

    @property
    def values(self) -> dict[str, Any]:
        """The plain values that were registered, by name; assign to items to change them.

        They are captured at every step. `restore()` fills lists, dicts, tensors and arrays in place.
        """
        return self._state.values

    @property
    def stats(self) -> CaptureStats:
        """What captures have cost this rank so far."""
        return CaptureStats() if self._capturer is None else self._capturer.stats

    @property
    def exchange_stats(self) -> ExchangeStats:
        """What this trainer moved for replication so far; nothing while daemons do it."""
        return ExchangeStats() if self._exchange is None else self._exchange.stats

    @property
    def every(self) -> int:
        """At most one of this many steps is captured: 1, or up to `replication.max_every` on a busy network."""
        return 1 if self._pace is None else self._pace.every

    @property
    def watermark(self) -> Pair | None:
        """The newest committed generation and step that this rank knows of, or None."""
        return None if self._capturer is None else self._capturer.watermark

    @property
    def protected(self) -> Protection:
        """Whether a failure now would cost little, and how many steps are at risk.

        False with more than 3 steps at risk, or with 2 for more than 30 s; after `close()`; and in a forked child.
        Rank 0 also logs changes.
        """
        if self._pace is None:
            return Protection(
                steps_at_risk=self._step, seconds_at_risk=0.0, reason="there is no daemon: nothing is kept"
            )
        if self._closed or os.getpid() != self._pid:
            # No lock is taken: a fork may have happened while one was held.
            committed = 0 if self.watermark is None else self.watermark[1]
            at_risk = max(0, self._step - committed)
            return Protection(steps_at_risk=at_risk, seconds_at_risk=0.0, reason="it is closed: nothing is kept")
        return self._pace.protection.now

    @property
    def planned_step(self) -> int:
        """The completed steps that `restore()` will return, known before it; 0 if there is nothing to restore.

        A script that has read 0 may leave `restore()` out.
        """
        self._knows_plan = True
        return 0 if self._plan is None else self._plan[1]

    @property
    def planned_world(self) -> int:
        """How many ranks made what `restore()` continues from; 0 if there is nothing to restore, or it is an import.

        A script that keeps its global batch when ranks come or go divides it by the ranks that there are now.
        """
        self._knows_world = True
        return self._made_by

    @property
    def unhealthy_steps(self) -> frozenset[int]:
        """The steps after `planned_step` because of which the run went back, the same on all ranks: skip their data."""
        return self._unhealthy

    def replace(self, **objects: Any) -> None:
        """Keep other objects from the next `step()` on, under registered names: a new optimizer for unfrozen layers.

        After a restart, build the objects as they were at `planned_step`, call `replace()`, then `restore()`.

        Raises:
            StateError: There is no object of that name, or what replaces it is none; nothing was replaced.
        """
        self._state.replace(objects)
        self._unregistered.forget()

    def restore(self) -> int:
        """Load the state that all ranks agreed to continue from, and return its number of completed steps, 0 if none.

        Call it once, before the first step. A run that begins with an import gets its contents; rank 0 warns about what
        the import lacks.

        A state that another number of ranks made is shared out anew: shards of DTensors by where the objects have
        theirs, and what was the same on all ranks as it is. An object that differs between ranks needs a method
        `reshard(states, rank, world_size)`, which returns what `load_state_dict` gets; `states` has what
        `state_dict()` returned on each rank.

        Raises:
            StateError: The registered objects do not fit (nothing was loaded), an object did not take back exactly what
                was captured (the state is loaded in part), or `restore()` or `step()` was called before.
            TopologyError: It was made on another device mesh; nothing was loaded.
            RestoreError: No verified copy of it is left.
            SlotError: It is an import that holds no state.
        """
        if self._restored or self._step:
            after = f"step({self._step})" if self._step else "restore()"
            self._refuse(StateError(f"restore() after {after}: call it once, before the first step"))
        if self._link is not None and self._capturer is not None:
            self._state.begin()
            if self._plan is not None:
                self._restore(self._plan, self._link, self._capturer)
        self._restored = True
        return self._step

    def _restore(self, plan: Pair, link: Link, capturer: Capturer) -> None:
        started_s = time.monotonic()
        try:
            assert self._env is not None
            if self._reshapes or is_import(plan):
                self._load_made(plan, link, self._env)
            else:
                self._load_slot(link.request("restore", within_s=_RESTORE_S)["path"], capturer)
        except CheckpointError as error:
            if isinstance(error, StateError | TopologyError) or is_import(plan):
                self._refuse(error)
            raise
        self._step = plan[1]
        link.notify("restored", step=self._step, seconds=time.monotonic() - started_s)

    def step(self, n: int | None = None, *, healthy: bool | torch.Tensor = True) -> None:
        """Declare `n` optimizer steps completed (default: one more than before), and begin to capture the state.

        Call it on every rank, after `optimizer.step()`. The first call waits until the daemon has allocated the slots.

        Args:
            healthy: Whether this rank would go on from this state, as in `loss.isfinite()`. What any rank calls
                unhealthy is never committed; `root.unhealthy_steps` in a row restart all from what is.

        Raises:
            TypeError: `n` is no integer, or `healthy` no single bool.
            ValueError: `n` is not greater than before, or less than 1.
            StateError: `restore()` was not called, or the state cannot be captured.
            MemoryBudgetError: The first capture does not fit in the memory budget of the host.
            InjectedFault: `resilient-inject` ordered it.
        """
        if (is_healthy := one_bool(healthy)) is None:
            self._refuse(TypeError(f"step(healthy={str(healthy)[:80]}): give one bool, as in loss.isfinite()"))
        self._injected.strike(self._state)
        started_s = time.monotonic()
        n = self._checked(n)
        if self._link is not None:
            self._refuse_foreign()
        self._step = n
        due_rng.completed()
        if self._closed and not self._warned and os.getpid() == self._pid:
            self._warned = True
            warnings.warn(f"step({n}) after close(): no more checkpoints are kept", RuntimeWarning, stacklevel=2)
        if self._link is None or self._capturer is None or self._pace is None or os.getpid() != self._pid:
            return
        self._pace.enter()
        self._accumulation.completed(n)
        # What a slow CPU makes longer, but neither the wait for other ranks nor what else runs on the host does.
        worked_s = time.thread_time() if self._is_on_cpu else None
        self._link.notify("progress", step=n, worked_s=worked_s, **({} if is_healthy else {"unhealthy": True}))
        self._pace.protection.stepped(n)
        if self._pace.captures:
            try:
                if is_healthy:
                    self._capturer.submit(n, self._state)
                else:
                    self._capturer.omit(n)
            except StateError as error:
                self._refuse(error)
            self._warn(self._state.order.replaced or self._state.unsaved.trained)
            self._warn(self._state.outgrown())
            self._warn(self._state.unsaved.changing)
            if not self._knows_plan:
                self._warn(self._state.changed())
        self._pace.leave(n)
        self._capturer.stats.stall_s += time.monotonic() - started_s

    def _checked(self, n: int | None) -> int:
        """Return the number of completed steps that `step` is called with."""
        given = n
        try:
            n = self._step + 1 if n is None else operator.index(n)
        except TypeError:
            n = None  # to be refused out here, without Python's own error in front
        if n is None:
            self._refuse(TypeError(f"step({given!r}): n is the number of completed steps, an integer"))
        if n < 1:
            self._refuse(ValueError(f"step({n}): n is the number of completed steps, at least 1"))
        # A script that has read that there is nothing to restore may leave the call out.
        if not self._restored and not (self._knows_plan and self._plan is None):
            begins = 0 if self._plan is None else self._plan[1]
            self._refuse(
                StateError(
                    f"step({n}) before restore(): call restore() once, before the first step; this run continues from "
                    f"step {begins}"
                )
            )
        if n <= self._step:
            self._refuse(ValueError(f"step({n}) after step({self._step}): completed steps must increase"))
        return n

    def _refuse(self, error: Exception) -> NoReturn:
        """Raise what no restart cures; the launcher shall not try, unless the script goes on with further steps."""
        if self._link is not None and os.getpid() == self._pid:
            self._link.notify("refused", message=_line(str(error)))
        raise refusal(error)

    def _warn(self, text: str | None) -> None:
        """Log once what a recovery would not bring back."""
        if text is not None and text not in self._told:
            self._told.add(text)
            warnings.warn(text, RuntimeWarning, stacklevel=3)

    def pause(self, limit_s: float | None = None) -> AbstractContextManager[None]:
        """Return a context in which no rank of the run counts as hung, for long work such as an evaluation.

        Every rank may pause, or one while others wait for it. A stopped process counts as hung all the same. Of nested
        pauses, the outermost counts. A pause outlives the daemon.

        Args:
            limit_s: Seconds after which this rank counts as hung after all, None for never.

        Raises:
            ValueError: `limit_s` is not greater than 0.
        """
        if limit_s is not None and not 0 < limit_s < float("inf"):
            message = f"pause(limit_s={limit_s}): give a positive number of seconds, or None for no limit"
            self._refuse(ValueError(message))
        return nullcontext() if self._pulse is None or os.getpid() != self._pid else self._pulse.pause(limit_s)

    def wait(self, timeout_s: float = 60.0) -> bool:
        """Return whether the last step is captured on this host, waiting up to `timeout_s` for it.

        Raises:
            MemoryBudgetError: The first capture does not fit in the memory budget of the host.
        """
        if self._capturer is None or os.getpid() != self._pid:
            return False
        return self._capturer.wait(timeout_s)

    def close(self) -> None:
        """Wait for a capture in progress, and detach; also done at exit and at the end of a `with` block.

        Call it before minutes of work after the last step, or use `pause()`: an attached rank that makes no steps
        counts as hung. The first `step()` afterwards warns; a second `close()` does nothing.
        """
        if self._capturer is None or os.getpid() != self._pid:
            return
        self._closed = True
        # What ends the script, whichever hooks that has set. Its text is the script's own business.
        error = sys.exc_info()[1] or getattr(sys, "last_value", None)
        if error is not None and self._link is not None:
            texts = (type(error).__qualname__, "".join(traceback.format_exception_only(error)))
            digest = ".".join(xxhash.xxh3_64_hexdigest(text.encode(errors="replace")) for text in texts)
            self._link.notify("raised", digest=digest, step=self._step)
        for hook in self._hooks:
            hook.remove()
        if _open.get(self._pid) is self:
            del _open[self._pid]
            if self._step:
                _begun.add(self._env)
        for each in (self._pulse, self._pace, self._exchange, self._capturer):
            if each is not None:
                each.close()
        atexit.unregister(self.close)
        self._link = None

    def __enter__(self) -> Self:
        """Return this object."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Close."""
        self.close()

    def _attach(self, env: TrainerEnv) -> None:
        if os.getpid() in _open:
            raise StateError(
                "this process has a Checkpointer already, and two would write the same slots: "
                "register everything with one"
            )
        if env in _begun:
            # A run has one sequence of steps: after a failure this one would be given the steps of its predecessor.
            warnings.warn(
                "no checkpoints are kept: another Checkpointer of this process has been at work, and a run has one "
                "sequence of steps. Register everything with one Checkpointer, or give each phase a --rdzv-id",
                RuntimeWarning,
                stacklevel=3,
            )
            return
        if text := foreign(self._state.objects.values()):
            raise StateError(text)
        flat = self._state.flatten()
        self._topology = self._state.topology(flat, env.world_size)
        self._state.check_kept()
        capturer = Capturer(env, topology=self._topology)
        link = Link(
            env,
            topology=self._topology,
            estimate_bytes=self._state.estimate_bytes(flat),
            on_attached=lambda answer: self._on_attached(link, capturer, answer),
            on_agreed=lambda message: self._on_agreed(capturer, message),
            on_fault=self._injected.order,
            on_other=self._on_message,
        )
        try:
            answer = link.open(_ATTACH_S)
        except OSError as error:
            if env.generation > 1:
                # Other ranks may restore; starting from scratch beside them would be silently wrong.
                raise DaemonError(f"no daemon at {env.socket} ({error}): is resilientd running?") from error
            warnings.warn(
                f"no checkpoints are kept: no daemon at {env.socket} ({error}). "
                "Start resilientd, or let resilient-run start one",
                RuntimeWarning,
                stacklevel=3,
            )
            return
        self._plan, self._made_by = read_pair(answer.get("restore")), answer.get("made_by") or 0
        self._reshapes, self._unhealthy = answer.get("reshapes", False), frozenset(answer.get("unhealthy", ()))
        self._link = link
        self._is_on_cpu = self._state.device() is None
        self._pulse = Pulse(link)
        self._pulse.start()
        self._capturer = capturer
        self._exchange = self._begin_exchange(env, link, answer)
        capturer.start(link, on_complete=None if self._exchange is None else self._exchange.offer)
        _open[self._pid] = self
        self._hooks = (
            register_optimizer_step_pre_hook(self._before_optimizer_step),
            register_optimizer_step_post_hook(lambda optimizer, *_: self._accumulation.stepped(optimizer)),
        )
        atexit.register(self.close)

    def _begin_exchange(self, env: TrainerEnv, link: Link, answer: Message) -> Exchange | None:
        routes, settings = answer.get("routes"), answer.get("replication")
        if not routes or not settings:
            return None
        config = EdgeConfig(
            sub_buffers=settings["sub_buffers"],
            sub_buffer_bytes=settings["sub_buffer_bytes"],
            device=self._state.device(),
        )
        assert self._pace is not None, "it is made at the attachment"
        exchange = Exchange(env, link, routes=routes, config=config, pace=self._pace)
        exchange.start()
        return exchange

    def _on_attached(self, link: Link, capturer: Capturer, answer: Message) -> None:
        capturer.on_attached(answer.get("eager", ()))
        self._on_agreed(capturer, answer)
        if self._pace is None:
            loud = self._env is not None and self._env.rank == 0
            self._pace = TrainerPace(answer["replication"], link, capturer, loud=loud)
        else:
            self._pace.on_attached(answer["replication"])
        if self._exchange is not None:
            self._exchange.attached()
        if self._pulse is not None:
            self._pulse.attached()

    def _on_agreed(self, capturer: Capturer, message: Message) -> None:
        next_ = read_pair(message["next"])
        assert next_ is not None
        capturer.on_agreed(read_pair(message["watermark"]), next_, [Pair(*each) for each in message["older"]])
        if self._pace is not None:
            self._pace.protection.committed()

    def _on_message(self, message: Message) -> None:
        if self._pace is not None:
            self._pace.on_message(message)

    def _before_optimizer_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Let the copy under way end before any optimizer changes what it reads; with a closure, after that has run.

        Which optimizer it is does not matter: captures are right also where nothing waits, but then they fail.
        """
        if self._capturer is None or os.getpid() != self._pid:
            return None
        self._refuse_foreign()
        self._warn(self._unregistered.before_step(optimizer))
        self._warn(self._accumulation.before_step(optimizer))
        if not self._capturer.reads:
            return None
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if not callable(closure):
            self._release()
            return None

        @functools.wraps(closure)
        def released(*closure_args: Any, **closure_kwargs: Any) -> Any:
            try:
                return closure(*closure_args, **closure_kwargs)
            finally:
                self._release()

        if len(args) > 1:
            return (args[0], released, *args[2:]), kwargs
        return args, {**kwargs, "closure": released}

    def _refuse_foreign(self) -> None:
        """Look once more when training begins: an engine may be made after the Checkpointer."""
        if not self._looked:
            self._looked = True
            if text := foreign(self._state.objects.values()):
                self._refuse(StateError(text))

    def _release(self) -> None:
        assert self._capturer is not None
        started_s = time.monotonic()
        self._capturer.release()
        self._capturer.stats.stall_s += time.monotonic() - started_s

    def _load_slot(self, path: str, capturer: Capturer) -> None:
        slot = Slot.open(path, writable=True)
        # After an error it stays mapped: whoever shows the variables of the traceback reads the tensors in it.
        self._load(slot)
        capturer.prefer(slot.payload_offset)
        slot.close()

    def _check_made(self, plan: Pair) -> None:
        """Refuse what other ranks made, or an import, where only what a rank has captured itself can be loaded."""

    def _load_made(self, plan: Pair, link: Link, env: TrainerEnv) -> None:
        """Load what another number of ranks made, or an import."""
        self._check_made(plan)
        # Few runs begin so, and those that do not shall not wait for this.
        from .convert.captures import Answer, Captures
        from .convert.import_loader import take_over
        from .convert.reshape import reshape

        def ask(wanted: list[dict[str, Any]]) -> Answer:
            answer = link.request("read", within_s=_RESTORE_S, wanted=wanted)
            slot = Slot.open(answer["path"])
            data = memoryview(bytes(slot.buffer[slot.payload_offset :]))
            slot.close()
            return Answer(data=data, sources=answer["sources"], host=answer["host"])

        imported = is_import(plan)
        captures = Captures(ask, run_id=env.run_id, pair=plan, world_size=1 if imported else self._made_by)
        make = take_over if imported else reshape
        made = make(self._state, captures, rank=env.rank, world_size=env.world_size)
        self._load_state(made.manifest, made.payload, plan[1], made.untouched)
        told = list(made.told)
        if not imported and not self._knows_world:
            told.append(
                "the global batch is another one unless the script accounts for that (Checkpointer.planned_world)"
            )
        if told and env.rank == 0:
            others = f"{self._made_by} ranks made step {plan[1]}, and {env.world_size} go on with it: "
            warnings.warn(f"{'' if imported else others}{'; '.join(told)}", RuntimeWarning, stacklevel=5)

    def _load(self, slot: Slot) -> None:
        header = slot.header()
        self._check(header)
        manifest = parse(slot.manifest(), header.payload_bytes)
        whole = torch.frombuffer(slot.buffer, dtype=torch.uint8)
        self._load_state(manifest, whole[header.payload_offset : header.used_bytes], header.step)

    def _load_state(
        self, manifest: Manifest, payload: torch.Tensor, step: int, untouched: frozenset[str] = frozenset()
    ) -> None:
        others = self._state.load(manifest, payload, untouched)
        if others:
            warnings.warn(
                f"not everything equals step {step}, which may be right for what is applied later "
                f"or counts loads: {'; '.join(others)}",
                RuntimeWarning,
                stacklevel=6,
            )

    def _check(self, header: SlotHeader) -> None:
        assert self._env is not None
        found = (header.run_id, header.rank, header.generation, header.step)
        planned = (self._env.run_id, self._env.rank, *(self._plan or ()))
        if found != planned:
            raise RestoreError(f"the daemon gave the slot of {found}, planned is {planned}")
        if header.topology != self._topology:
            raise TopologyError(
                f"the checkpoint of step {header.step} was made by {header.world_size} ranks with topology "
                f"{header.topology:#x}, this run has {self._env.world_size} ranks with {self._topology:#x}: "
                "start as many workers with the same mesh as before, or start a new run id"
            )


def _line(text: str) -> str:
    """Return `text` as one line that a message can carry."""
    return "".join(each if each.isprintable() else "?" for each in " ".join(text.split()))[:_MAX_TEXT]
