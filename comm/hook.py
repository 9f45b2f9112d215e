"""Puts a scheme under DistributedDataParallel: its communication hook, which sums while backward goes on."""

import os
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from .errors import CommError
from .net.alike import check_alike
from .net.fabric import Fabric, check_divides, make_fabric
from .net.scheme import Scheme
from .net.transport import Transport
from .net.two_level import TwoLevel
from .runtime.bucket import LEAST_ELEMENTS
from .runtime.choice import Choice, agreed_scheme, check_choice, check_number
from .runtime.gradient_hook import GradientHook, synchronize
from .trial.advice import Method, methods
from .trial.trial import Trial
from .trial.tried import AUTO, AutoHook, TriedHook

_AUTO_OPTIONS: Final = {"lossy": False, "seconds": 30.0}


def register(
    model: DistributedDataParallel,
    scheme: Choice = "zen",
    *,
    ranks_per_host: int | None = None,
    least_elements: int = LEAST_ELEMENTS,
    **options: Any,
) -> GradientHook:
    """Let `scheme` sum the gradients of `model` from now on; all its ranks call this before the first backward pass.

    Args:
        model: Of torch's DDP; its sparse gradients (`nn.Embedding(sparse=True)`) stay sparse.
        scheme: A name of `resilient_run.comm.schemes` or of a compressor, which then has error feedback, or what makes
            a scheme for these ranks, as `lambda ranks: Compressed(ranks, MomentumCorrection(…))`. Or "auto": it trains
            with all-reduce, measures beside it what a step of this job takes with other schemes, and then takes the
            fastest, or stays with all-reduce where none is faster beyond the spread.
        ranks_per_host: Sum dense among so many consecutive ranks first, the ranks of a host, and between hosts by the
            scheme (thesis 3.4.1); 1 uses the scheme among all ranks. By default that is torchrun's LOCAL_WORLD_SIZE
            where there are several hosts and all have as many ranks, and 1 elsewhere.
        least_elements: Smaller gradients are all-reduced together.
        options: Of the scheme, if it is a name; of a compressor its `density`, if it has one; of "auto" `lossy`,
            whether schemes that change what is trained may be taken, too, and `seconds`, how long to measure, about.

    Returns:
        The hook; give it to the `Checkpointer` as one of its objects.

    Raises:
        CommError: There is no such scheme, options are given without a name, the ranks are given different ones, or
            are not a multiple of `ranks_per_host`; or the model is not DDP's, or has a hook.
    """
    if not isinstance(model, DistributedDataParallel):
        raise CommError(
            f"register() takes a model of DistributedDataParallel, got {type(model).__name__}: wrap it first, or use "
            "resilient_run.comm.replicate.register_replicated for FSDP2"
        )
    if model._comm_hooks:
        raise CommError("this model has a communication hook already; DDP has one for its life")
    make = _make_auto if scheme == AUTO else make_hook
    hook = make(model, scheme, ranks_per_host=ranks_per_host, least_elements=least_elements, **options)
    model.register_comm_hook(hook, synchronize)
    return hook


def make_hook(
    model: DistributedDataParallel,
    scheme: Choice,
    *,
    ranks_per_host: int | None = None,
    least_elements: int = LEAST_ELEMENTS,
    **options: Any,
) -> GradientHook:
    """Return what `register` registers, with the same arguments and errors."""
    given, per_host = _given(model, least_elements, ranks_per_host, scheme=scheme, **options)
    check_choice(scheme, options, ranks=given.size // per_host)
    fabric = _fabric(model, given, per_host)
    made = _made(fabric, scheme, options)
    return GradientHook(model, scheme=made, world=fabric.flat, least_elements=least_elements)


def make_tried(
    model: DistributedDataParallel,
    trial: Trial,
    tried: Sequence[Method],
    *,
    ranks_per_host: int | None,
    leads: bool = True,
) -> TriedHook:
    """Return a hook that trains as ever, and tries these methods; all ranks call this together."""
    fabric = _fabric(model, *_given(model, LEAST_ELEMENTS, ranks_per_host))
    schemes = _schemes(fabric, tried)
    return TriedHook(model, trial, schemes, world=fabric.flat, least_elements=LEAST_ELEMENTS, leads=leads)


def _make_auto(
    model: DistributedDataParallel,
    scheme: Choice,
    *,
    ranks_per_host: int | None,
    least_elements: int,
    **options: Any,
) -> GradientHook:
    given, per_host = _given(model, least_elements, ranks_per_host, scheme=scheme, **options)
    if others := options.keys() - _AUTO_OPTIONS.keys():
        raise CommError(f"auto has no option {', '.join(sorted(others))}; it has {', '.join(_AUTO_OPTIONS)}")
    options = _AUTO_OPTIONS | options
    check_number("auto: seconds", float, options["seconds"])
    if not isinstance(options["lossy"], bool):
        raise CommError(f"auto: lossy must be True or False, got {options['lossy']!r}")
    if not 0 < options["seconds"] < float("inf"):
        raise CommError(f"auto: seconds must be more than 0, got {options['seconds']!r}")
    fabric = _fabric(model, given, per_host)
    tried = [method for method in methods(ranks_per_host) if method.exact or options["lossy"]]
    schemes = _schemes(fabric, tried)
    trial = Trial(tried, seconds=options["seconds"])
    return AutoHook(model, trial, schemes, world=fabric.flat, least_elements=least_elements)


def _fabric(model: DistributedDataParallel, given: Transport, ranks_per_host: int) -> Fabric:
    """Return process groups of a model's ranks, for schemes of which one sums at a time."""
    ranks = dist.get_process_group_ranks(model.process_group)
    return make_fabric(ranks, ranks_per_host=ranks_per_host, device=given.device)


def _made(fabric: Fabric, choice: Choice, options: Mapping[str, Any]) -> Scheme:
    made = agreed_scheme(choice, fabric.inter, fabric.flat, options)
    return made if fabric.intra.size == 1 else TwoLevel(fabric.intra, made)


def _schemes(fabric: Fabric, tried: Sequence[Method]) -> dict[str, Scheme]:
    return {each.name: _made(fabric, each.scheme, each.options) for each in tried if each.scheme}


def _given(
    model: DistributedDataParallel, least_elements: int, ranks_per_host: int | None, **alike: Any
) -> tuple[Transport, int]:
    """Return the ranks, which are given the same, and how many a host has.

    They are those of the group that is there: a mistake leaves nothing behind.
    """
    ignored = model.parameters_to_ignore
    device = next(p.device for name, p in model.module.named_parameters() if name not in ignored)
    given = Transport(model.process_group, device)
    check_alike(given, **alike, least_elements=least_elements, ranks_per_host=ranks_per_host)
    check_number("least_elements", int, least_elements)
    return given, _ranks_per_host(given, ranks_per_host)


def _ranks_per_host(world: Transport, given: int | None) -> int:
    """Return what all ranks are given; without that what torchrun says to all in the order of the group, or 1.

    All ranks return the same, whatever their environments are.
    """
    if given is not None:
        return check_divides(given, world.size)
    own = torch.tensor([_from_torchrun("LOCAL_WORLD_SIZE"), _from_torchrun("LOCAL_RANK")])
    found: list[list[int]] = world.gather_numbers(own).tolist()
    size = found[0][0]
    alike = found == [[size, rank % max(size, 1)] for rank in range(world.size)]
    return size if alike and 0 < size < world.size and world.size % size == 0 else 1


def _from_torchrun(name: str) -> int:
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() else 0
