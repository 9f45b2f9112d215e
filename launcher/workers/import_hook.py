"""What `--rr-auto` has in a worker: an import hook that waits for the module of a framework's trainer.

The zygote installs it in a warm worker. In a cold one the interpreter finds this file as module ``sitecustomize`` in a
directory in front of PYTHONPATH, and imports it just before it runs the script (see `warm.SiteHook`).

Nothing of resilient-run is imported before the script has imported a trainer, and no framework at all. So a script that
uses none finds the interpreter as it would be without this, but for one entry of ``sys.meta_path``.
"""

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

AUTO = "RESILIENT_AUTO_WORKER"
"""Environment variable of a worker: "begin", or "restore" if its generation has something to restore."""

PROBE = "RESILIENT_SITE_PROBE"
PROBE_EXIT_CODE = 86
"""How an interpreter leaves that was only asked whether a hook of ours is reached."""

OPTIMIZER = "torch.optim.optimizer"
TRAINERS = ("transformers.trainer", "lightning.pytorch.trainer.trainer", "pytorch_lightning.trainer.trainer")

_OWN_LOOP = (
    "the loop is the script's own, and nothing tells it which of its steps were restored; "
    "add a Checkpointer, restore() and step(n): docs/quickstart.md"
)
_ACCELERATE = "; with Accelerate: docs/frameworks/accelerate.md"


class ImportHook:
    """Waits for the modules in `TRAINERS`, and for the first step of an optimizer without a trainer.

    Attributes:
        restores: Whether this generation has something to restore.
        is_taken: Whether a training of this process was protected already.
    """

    def __init__(self, *, restores: bool) -> None:
        self.restores = restores
        self.is_taken = False
        self._pid = os.getpid()
        self._speaks = os.environ.get("RANK", "0") == "0"
        self._said: set[str] = set()
        self._waiting = {*TRAINERS, OPTIMIZER}
        self._depth = 0

    def install(self) -> None:
        """Begin to wait; what was imported beforehand counts as imported now."""
        sys.meta_path.insert(0, self)
        for name in sorted(self._waiting & sys.modules.keys()):
            self._waiting.discard(name)
            self.imported(sys.modules[name])
        if self._speaks:
            import atexit

            atexit.register(self._at_exit)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Return what the other finders do, with a loader that tells this object when the module is there."""
        if name not in self._waiting:
            return None
        self._waiting.discard(name)
        for finder in sys.meta_path:
            find = None if finder is self else getattr(finder, "find_spec", None)
            if find is not None and (spec := find(name, path, target)) is not None:
                if spec.loader is not None:
                    spec.loader = _ReportingLoader(spec.loader, self)
                return spec
        return None

    def imported(self, module: ModuleType) -> None:
        """Act on a module that was just imported; what goes wrong here is said, and the script goes on."""
        try:
            if module.__name__ == OPTIMIZER:
                if self._speaks:
                    module.register_optimizer_step_post_hook(self._after_step)
            else:
                importlib.import_module("resilient_run.ckpt.integrations.auto").watch(module, self)
        except Exception as error:  # noqa: BLE001 - the script has not asked for any of this
            self.protects_nothing(f"{module.__name__}: {error!r}")

    @contextmanager
    def training(self) -> Iterator[None]:
        """While the block runs, optimizers step for a trainer."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def is_here(self) -> bool:
        """Tell whether this is the worker, and no fork of it."""
        return os.getpid() == self._pid

    def say(self, text: str) -> None:
        """Log a line, once in a run's generation."""
        if self._speaks and self.is_here() and text not in self._said:
            import logging

            self._said.add(text)
            logging.getLogger("resilient_run.auto").warning("%s", text)

    def protects_nothing(self, reason: str) -> None:
        """Report why not."""
        self.say(f"--rr-auto protects nothing here: {reason}")

    def leaves_alone(self) -> None:
        """Report that the script protects itself."""
        self.say("--rr-auto leaves this script alone: it protects itself")

    def _after_step(self, *_: Any) -> None:
        # It stays registered, because optimizers must not lose a hook while they call it.
        if self._said or self._depth or not self.is_here():
            return
        checkpointer = sys.modules.get("resilient_run.ckpt.checkpointer")
        if checkpointer is not None and os.getpid() in checkpointer._open:
            self.leaves_alone()
        else:
            self.protects_nothing(_OWN_LOOP + (_ACCELERATE if "accelerate" in sys.modules else ""))

    def _at_exit(self) -> None:
        if not self._said:
            self.protects_nothing("nothing was trained")


class _ReportingLoader:
    """A module's loader that tells `ImportHook` of it, and which the module does not see."""

    def __init__(self, loader: Any, hook: ImportHook) -> None:
        self._loader = loader
        self._hook = hook

    def create_module(self, spec: Any) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._hook.imported(module)


def install() -> None:
    """Do what the variable `AUTO` of this worker says, and take it away: what the script starts is not its business."""
    said = os.environ.pop(AUTO, None)
    if said is not None:
        ImportHook(restores=said == "restore").install()


def import_hidden_sitecustomize(hook_dir: str) -> bool:
    """Undo what made the interpreter find a hook of ours, then import what it hides; tell whether there is something.

    Args:
        hook_dir: Where the interpreter has found it.
    """
    os.environ["PYTHONPATH"] = os.environ["PYTHONPATH"].removeprefix(hook_dir).removeprefix(os.pathsep)
    if not os.environ["PYTHONPATH"]:
        del os.environ["PYTHONPATH"]
    sys.path.remove(hook_dir)
    sys.path_importer_cache.pop(hook_dir, None)
    del sys.modules["sitecustomize"]
    try:
        importlib.import_module("sitecustomize")
    except ModuleNotFoundError as error:
        if error.name != "sitecustomize":
            raise
        return False
    return True


def _customize() -> None:
    if PROBE in os.environ:
        os._exit(PROBE_EXIT_CODE)
    try:
        has_sitecustomize = import_hidden_sitecustomize(os.path.dirname(__file__))
    finally:
        install()
    if not has_sitecustomize:
        raise ModuleNotFoundError("No module named 'sitecustomize'", name="sitecustomize")


if __name__ == "sitecustomize":
    _customize()
