"""What users may rule out of the decision tree (Espresso, Section 4.2.2), and the restricted trees of the paper."""

from collections.abc import Callable, Iterable, Mapping
from typing import Final

from .tree import Device, Option, Phase, Role, all_options

Constraint = Callable[[Option], bool]


def uncompressed(option: Option) -> bool:
    """No compression at all."""
    return not option.compressions


def compressed(option: Option) -> bool:
    """At least one compression."""
    return bool(option.compressions)


def gpu_only(option: Option) -> bool:
    """No compression or decompression on CPUs."""
    return Device.CPU not in option.devices


def cpu_only(option: Option) -> bool:
    """No compression or decompression on GPUs."""
    return Device.GPU not in option.devices


def hierarchical(option: Option) -> bool:
    """Not all GPUs in one phase."""
    return not option.flat


def flat(option: Option) -> bool:
    """All GPUs in one phase."""
    return option.flat


def divisible(option: Option) -> bool:
    """Compressed data only in two-step schemes."""
    return all(comm.role is not Role.WHOLE for comm in option.comms if comm.compressed)


def indivisible(option: Option) -> bool:
    """Compressed data only in one-step schemes, between hosts or flat."""
    return all(comm.role is Role.WHOLE for comm in option.comms if comm.compressed and comm.phase is not Phase.INTRA2)


def rootless(option: Option) -> bool:
    """No routine with a root (reduce, gather, broadcast)."""
    return not any(comm.routine.rooted for comm in option.comms)


def dense_in_hosts(option: Option) -> bool:
    """Compressed data only between hosts."""
    return all(comm.phase is Phase.INTER for comm in option.comms if comm.compressed)


def compress_once(option: Option) -> bool:
    """At most one compression: fewer compressions, less loss of precision."""
    return option.compressions <= 1


def same_device(option: Option) -> bool:
    """All compressions and decompressions of a tensor on one device."""
    return len(option.devices) <= 1


CONSTRAINTS: Final[Mapping[str, Constraint]] = {
    "uncompressed": uncompressed,
    "compressed": compressed,
    "gpu-only": gpu_only,
    "cpu-only": cpu_only,
    "flat": flat,
    "hierarchical": hierarchical,
    "divisible": divisible,
    "indivisible": indivisible,
    "rootless": rootless,
    "dense-in-hosts": dense_in_hosts,
    "compress-once": compress_once,
    "same-device": same_device,
}


def allowed(names: Iterable[str]) -> tuple[Option, ...]:
    """Return the options that meet all the named constraints.

    Raises:
        ValueError: A name is unknown, or nothing is left.
    """
    chosen = tuple(names)
    for name in chosen:
        if name not in CONSTRAINTS:
            raise ValueError(f"no constraint {name!r}; there are {', '.join(CONSTRAINTS)}")
    found = tuple(option for option in all_options() if all(CONSTRAINTS[name](option) for name in chosen))
    if not found:
        raise ValueError(f"no option meets {', '.join(chosen)} together; leave one out")
    return found
