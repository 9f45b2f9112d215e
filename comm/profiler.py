"""When each gradient of a user's own model becomes ready: the model file that planners read, measured."""

import json
import logging
import time
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

from .errors import CommError
from .plan.model import VERSION

log = logging.getLogger(__name__)

_BEGIN, _FORWARD = "begin of forward", "end of forward"


class BackwardProfiler:
    """Measures the backward pass of a module, parameter by parameter, over several iterations (Espresso, section 4.3).

    Wrap it around a training job's own loop, without other hooks that communicate in the backward pass (so not under
    DDP), and write the file after at least `iterations` of them:

        profiler = BackwardProfiler(model)
        for batch in data:
            loss(model(batch)).backward()
        profiler.write(Path("model.json"), name="gpt")

    Time is that of the device: on CUDA it comes from events on the current stream.

    Args:
        module: Its trainable parameters get one gradient each in a backward pass, or none. Those that get none are
            written as ready together with the last one, as a `GradientSynchronizer` treats them: as zeros.
        iterations: How many are measured at most.
        warm_up: How many before them are not.

    Raises:
        CommError: The module has no trainable parameters.
    """

    def __init__(self, module: nn.Module, *, iterations: int = 100, warm_up: int = 5) -> None:
        self._parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        if not self._parameters:
            raise CommError(
                f"this {type(module).__name__} has no trainable parameters; profile the model that is trained"
            )
        self._left = warm_up + iterations
        self._iterations = iterations
        self._cuda = any(parameter.is_cuda for parameter in self._parameters.values())
        self._marks: list[tuple[str, Any]] = []
        self._seen: list[list[tuple[str, Any]]] = []
        self._hooks = [
            module.register_forward_pre_hook(lambda *_: self._begin()),
            module.register_forward_hook(lambda *_: self._mark(_FORWARD)),
            *(
                parameter.register_post_accumulate_grad_hook(lambda _, name=name: self._mark(name))  # type: ignore[no-untyped-call]
                for name, parameter in self._parameters.items()
            ),
        ]

    @property
    def complete(self) -> bool:
        """Whether `iterations` were measured."""
        return len(self._seen) >= self._iterations

    def write(self, path: Path, *, name: str) -> None:
        """Write the model file of what was measured, medians, and take the hooks off.

        Where iterations bring gradients of different parameters, those that bring the most frequent set count; the
        file's note and a warning say how many others there were.

        Raises:
            CommError: The name is empty, nothing was measured, or gradients come more than once in an iteration.
            OSError: The file cannot be written.
        """
        if not name:
            raise CommError("the model has no name; give one, as name='gpt'")
        for hook in self._hooks:
            hook.remove()
        self._end()
        if not self._seen:
            raise CommError("no backward pass was measured after the warm-up; train for more iterations")
        runs, note = self._usual(name)
        backward_s = {
            parameter: median(self._between(marks[index + 1], marks[index + 2]) for marks in runs)
            for index, parameter in enumerate(_order(runs[0]))
        }
        unused = {parameter: 0.0 for parameter in self._parameters if parameter not in backward_s}
        document = {
            "version": VERSION,
            "model": name,
            "note": note,
            "forward_s": median(self._between(marks[0], marks[1]) for marks in runs),
            "tensors": [
                {"name": parameter, "numel": self._parameters[parameter].numel(), "backward_s": seconds}
                for parameter, seconds in (backward_s | unused).items()
            ],
        }
        path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")

    def _usual(self, name: str) -> tuple[list[list[tuple[str, Any]]], str]:
        """Return the iterations whose gradients come in the most frequent order, and the note about the others."""
        usual = Counter(frozenset(_order(marks)) for marks in self._seen).most_common(1)[0][0]
        alike = [marks for marks in self._seen if usual == frozenset(_order(marks))]
        # Gradients that come at almost the same time may change places.
        order = Counter(map(_order, alike)).most_common(1)[0][0]
        if _FORWARD in usual or len(order) > len(usual):
            raise CommError(
                "an iteration calls the module or brings gradients more than once; profile a module that is called "
                "once in an iteration, with one backward pass"
            )
        runs = [marks for marks in alike if _order(marks) == order]
        note = f"medians of {len(runs)} iterations"
        if others := len(self._seen) - len(alike):
            note += f"; {others} with gradients of other parameters left out"
            log.warning("%s: iterations differ, and a plan fits only the usual ones: %s", name, note)
        return runs, note

    def _begin(self) -> None:
        if torch.is_grad_enabled():
            self._end()
            self._mark(_BEGIN)

    def _end(self) -> None:
        """Keep the iteration that is over, if it had a backward pass."""
        marks, self._marks = self._marks, []
        if len(marks) <= 2:
            return
        self._left -= 1
        if 0 <= self._left < self._iterations:
            self._seen.append(marks)

    def _mark(self, name: str) -> None:
        if name == _FORWARD and not torch.is_grad_enabled():
            return
        if name != _BEGIN and not self._marks:
            return
        now: Any = time.perf_counter()
        if self._cuda:
            now = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            now.record()
        self._marks.append((name, now))

    def _between(self, before: tuple[str, Any], after: tuple[str, Any]) -> float:
        if not self._cuda:
            return float(after[1] - before[1])
        after[1].synchronize()
        return float(before[1].elapsed_time(after[1])) / 1e3


def _order(marks: list[tuple[str, Any]]) -> tuple[str, ...]:
    """Return the marks after the forward pass: the gradients, as they became ready."""
    return tuple(name for name, _ in marks[2:])
