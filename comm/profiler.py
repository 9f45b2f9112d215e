"""When each gradient of a user's own model becomes ready: the model file that planners read, measured."""

import json
import time
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

from .errors import CommError
from .model import VERSION

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
        module: Its trainable parameters get one gradient each in every backward pass.
        iterations: How many are measured at most.
        warm_up: How many before them are not.
    """

    def __init__(self, module: nn.Module, *, iterations: int = 100, warm_up: int = 5) -> None:
        self._parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
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

        Raises:
            CommError: Nothing complete was measured, or gradients come more than once in an iteration.
            OSError: The file cannot be written.
        """
        for hook in self._hooks:
            hook.remove()
        self._end()
        orders = Counter(tuple(mark for mark, _ in marks[2:]) for marks in self._seen)
        if not orders:
            raise CommError("no backward pass was measured after the warm-up; train for more iterations")
        # Gradients that come at almost the same time may change places.
        order = orders.most_common(1)[0][0]
        if sorted(order) != sorted(self._parameters):
            raise CommError(
                f"a backward pass brings {len(order)} gradients for {len(self._parameters)} parameters; profile "
                f"without unused parameters, and with one backward pass for each forward pass"
            )
        runs = [marks for marks in self._seen if tuple(mark for mark, _ in marks[2:]) == order]
        forward_s = median(self._between(marks[0], marks[1]) for marks in runs)
        tensors = [
            {
                "name": parameter,
                "numel": self._parameters[parameter].numel(),
                "backward_s": median(self._between(marks[index + 1], marks[index + 2]) for marks in runs),
            }
            for index, parameter in enumerate(order)
        ]
        document = {
            "version": VERSION,
            "model": name,
            "note": f"medians of {len(runs)} iterations",
            "forward_s": forward_s,
            "tensors": tensors,
        }
        path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")

    def _begin(self) -> None:
        if torch.is_grad_enabled():
            self._end()
            self._mark(_BEGIN)

    def _end(self) -> None:
        """Keep the iteration that is over, if it went on to the last gradient."""
        marks, self._marks = self._marks, []
        if len(marks) < 2 + len(self._parameters):
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
