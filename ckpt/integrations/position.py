"""Where a loop is in its data: a DataLoader that goes on with the batch that follows, under the same random numbers.

What a loader gives follows from the random states at which its iterator was made and its first batch drawn, and from
how many batches were drawn since. These are the position. Going on is to draw as many again and drop them; their
indices are enough, unless worker processes have random states of their own, which drawing moves on.
"""

import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, Final

import numpy as np
import torch
import xxhash
from torch.utils.data import DataLoader, IterableDataset

from ..errors import StateError
from ..state.memory import memory
from ..state.state import due_rng, get_rng, set_rng
from ..state.tree import bytes_of
from .samples import Share, batches_in_epoch, reshard, rest, share_of

_END: Final = object()


class Excuses:
    """Who hears that a position can no longer be kept, in place of the loop, which then goes on without one.

    Attributes:
        hear: None where nobody does, and the loop ends with the error.
    """

    hear: Callable[[StateError], None] | None = None


excuses: Final = Excuses()


class PositionedLoader:
    """Stands for a DataLoader, and knows its position in the epoch.

    After `go_to` the next iterator gives what comes after that position. It sets the random generators of the process
    to what they were there, if it is the first one of all loaders that go on, and no step was completed since. An
    iterator counts as long as somebody holds it: after the end of an epoch, or a `break`, the next one begins at the
    beginning.

    Attributes:
        loader: The DataLoader.
    """

    def __init__(self, loader: Any, *, ahead: int = 0, whole: bool = False) -> None:
        """Wrap a loader, and record its position.

        Args:
            loader: A `torch.utils.data.DataLoader`.
            ahead: How many batches whoever iterates this draws before the loop gets them.
            whole: Whether whoever iterates this has to see the batches before the position again.

        Raises:
            StateError: A position in it could not be brought back exactly.
        """
        _check(loader)
        self.loader = loader
        self._ahead = ahead
        self._whole = whole
        self._draws: weakref.ref[_Draws] | None = None
        self._unmade: dict[str, torch.Tensor] = {}
        self._pending: dict[str, Any] | None = None
        self._is_asked = False
        self._resumed: tuple[int, int] | None = None

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """That of the loader: frameworks ask whether they were given a DataLoader."""
        return type(self.loader)

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # not set yet, as in a copy
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __len__(self) -> int:
        draws = None if self._draws is None else self._draws()
        batches = self.batches(self._pending if draws is None else draws.gone)
        return len(self.loader) if batches is None else batches

    def __iter__(self) -> Iterator[Any]:
        at, self._pending = self._pending, None
        draws = _Draws(self.loader, self.share, strict=self._whole)
        if at is None:
            self._warn_of_peek()
            draws.begin()
        else:
            self._resumed = due_rng.steps, _Draws.ended
            dropped = at["drawn"] - (0 if at["finished"] else self._ahead)
            draws.go_on(at, 0 if self._whole else max(0, dropped))
        self._draws = weakref.ref(draws)
        return draws

    def _warn_of_peek(self) -> None:
        """Record that the iterator that went on after a restore came to nothing, so that this epoch begins anew."""
        resumed, self._resumed = self._resumed, None
        if resumed == (due_rng.steps, _Draws.ended):
            warnings.warn(
                f"the first iterator of {type(self.loader.dataset).__qualname__} after restore() went on in the middle "
                "of its epoch, and no step was completed with it: the epoch starts over. Read data before "
                "restore(), and make no other iterator between it and the loop",
                RuntimeWarning,
                stacklevel=3,
            )

    @property
    def pending(self) -> bool:
        """Whether the next iterator goes on in the middle of an epoch."""
        return self._pending is not None

    @property
    def in_epoch(self) -> bool:
        """Whether somebody holds an iterator."""
        return self._draws is not None and self._draws() is not None

    def position(self) -> dict[str, Any]:
        """Return the position, in an epoch or between two."""
        found = {name: generator.get_state() for name, generator in _generators(self.loader).items()}
        generators = self._unmade | found
        draws = None if self._draws is None else self._draws()
        at = self._pending if draws is None else draws.state()
        return {"generators": generators, "at": at and {**at, "now": due_rng.states or get_rng()}}

    def go_to(self, position: Mapping[str, Any]) -> None:
        """Let the next iterator go on from what `position` returned, in this process or an earlier one."""
        # Some samplers make theirs, and seed it, when they are asked for an iterator.
        self._unmade = _set_generators(self.loader, position["generators"])
        self._pending, self._is_asked = position["at"], False
        if self._pending is not None:
            due_rng.states = self._pending["now"]

    @property
    def share(self) -> Share:
        """Which share of the data this loader gives."""
        return share_of(self.loader)

    def batches(self, at: Mapping[str, Any] | None) -> int | None:
        """Return how many batches the epoch of a position has; None if no other number of ranks has begun it."""
        return batches_in_epoch(self.loader, at, self.share) if at is not None and at.get("skipped") else None

    def reshard(self, states: Mapping[int, Mapping[str, Any]], rank: int, world_size: int) -> dict[str, Any]:
        """Return the position of `rank` of `world_size`, of those that another number of ranks had, by rank.

        In the middle of an epoch the ranks share what is left of it, so that no sample is lost or given twice.

        Raises:
            StateError: That is not known for the samplers of this loader.
        """
        del world_size  # the sampler has it
        here = {_short(name): name for name in _generators(self.loader)}

        def named(found: Mapping[str, Any]) -> dict[str, Any]:
            return {here.get(_short(name), name): state for name, state in found.items()}

        # With one rank Accelerate's samplers lie less deep.
        states = {
            other: {
                **state,
                "generators": named(state["generators"]),
                "at": state["at"] and {**state["at"], "made_generators": named(state["at"]["made_generators"])},
            }
            for other, state in states.items()
        }
        return reshard(self.loader, states, rank, share=self.share, ahead=self._ahead)

    def ask(self) -> None:
        """Record that an iterator will be made by whoever was asked for one now: only the first one goes on."""
        if self._is_asked:
            self._pending = None
        self._is_asked = True


class ResumableLoader(PositionedLoader):
    """A DataLoader for a `Checkpointer` without a framework: in the middle of an epoch it goes on there.

    Example:
        ```
        loader = ResumableLoader(DataLoader(data, batch_size=32, shuffle=True, num_workers=4))
        checkpointer = Checkpointer(model=model, optimizer=optimizer, loader=loader)
        ```
    """

    def __init__(self, loader: Any) -> None:
        """Take the place of a `torch.utils.data.DataLoader`.

        Raises:
            StateError: A position in it could not be brought back exactly.
        """
        super().__init__(loader)

    def state_dict(self) -> dict[str, Any]:
        """Return the position, in an epoch or between two."""
        return self.position()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iterator go on from there."""
        self.go_to(state)


class _Draws(Iterator[Any]):
    """The iterator of one epoch, which knows what its batches follow from.

    Attributes:
        ended: How many epochs of any loader have come to their end.
        gone: What ranks of another number had of this epoch.
    """

    ended: ClassVar[int] = 0

    def __init__(self, loader: Any, share: Share, *, strict: bool) -> None:
        self._loader = loader
        self._share = share
        self.gone: dict[str, Any] = {}
        self._by_index = not isinstance(loader.dataset, IterableDataset)
        # Random numbers drawn in between those of training cannot be drawn again without it.
        self._strict = (strict or not self._by_index) and not loader.num_workers
        self._indices: _Indices | None = None
        self._seen = xxhash.xxh3_128()
        self._drawn = 0
        self._finished = False
        self._lost = False
        self._target: dict[str, Any] | None = None

    def begin(self) -> None:
        """Make the iterator of a new epoch."""
        self._made = self._first = self._last = get_rng()
        self._made_generators = {name: each.get_state() for name, each in _generators(self._loader).items()}
        self._iterator = self._make()

    def go_on(self, at: dict[str, Any], dropped: int) -> None:
        """Make the iterator of an epoch of which the first `dropped` batches are not given again.

        Raises:
            StateError: The loader does not give the same batches as before.
        """
        now, due_rng.states = due_rng.states or get_rng(), None
        self._made, self._first, self._last = at["made"], at["first"], at["last"]
        self._made_generators = at["made_generators"]
        self._target = at
        _set_generators(self._loader, self._made_generators)
        self.gone = {name: at[name] for name in ("skipped", "given", "order") if name in at}
        left = rest(self._loader, at, self._share) if at.get("skipped") else None
        set_rng(self._made)
        self._iterator = self._make(left)
        set_rng(self._first)
        if self._indices is not None and not self._loader.num_workers:
            self._drawn = self._indices.drop(dropped)
            self._digest_indices()
        while self._drawn < dropped and self._draw() is not _END:
            pass
        self._arrive()
        set_rng(now)

    def state(self) -> dict[str, Any]:
        """Return where it is, now."""
        if self._target is not None:
            return self._target
        return {
            "made": self._made,
            "made_generators": self._made_generators,
            "first": self._first,
            "last": self._last,
            "drawn": self._drawn,
            "finished": self._finished,
            "seen": self._seen.hexdigest(),
            "share": self._share,
            **self.gone,
        }

    def __next__(self) -> Any:
        now = get_rng()
        if self._target is not None:
            # Drawn before the position, and given after it.
            set_rng(self._first if self._drawn == 0 else self._last)
            batch = self._draw()
            self._arrive()
            set_rng(now)
        else:
            self._last = now
            if self._drawn == 0:
                self._first = now
            batch = self._draw()
            if self._strict and self._drawn > 1 and not self._lost and not _same(now, get_rng()):
                self._lose(
                    f"{type(self._loader.dataset).__qualname__} draws from the random generators of the process while "
                    "it is read, in between training: the same cannot be read again. Give it a generator of its own, "
                    "seeded where its iterator begins, or read it in a worker (num_workers=1)"
                )
        if batch is _END:
            _Draws.ended += 1
            raise StopIteration
        return batch

    def _make(self, left: Any = None) -> Iterator[Any]:
        """Make the loader's iterator; `left` takes the place of its sampler of batches."""
        if getattr(self._loader, "_initial_iter_for_state_dict", False):
            # A StatefulDataLoader has made its iterator for a state_dict(), at another time than now.
            self._loader._iterator, self._loader._initial_iter_for_state_dict = None, False
        if not self._by_index:
            return iter(self._loader)
        name = "sampler" if self._loader.batch_sampler is None else "batch_sampler"
        sampler = getattr(self._loader, name)
        self._indices = _Indices(sampler if left is None else left)
        # A DataLoader lets nobody set it. It is read once, when an iterator is made.
        vars(self._loader)[name] = self._indices
        try:
            iterator: Iterator[Any] = iter(self._loader)
        finally:
            vars(self._loader)[name] = sampler
        if not self._indices.is_read:
            # A class of the script's own makes it at its first batch, or elsewhere: what it gives has to tell.
            self._indices, self._strict = None, not self._loader.num_workers
        return iterator

    def _draw(self) -> Any:
        batch = next(self._iterator, _END)
        if batch is _END:
            self._finished = True
            return batch
        self._drawn += 1
        if self._indices is None:
            _digest(self._seen, batch)
        else:
            self._digest_indices()
        return batch

    def _digest_indices(self) -> None:
        """Count what belongs to the batches drawn so far; workers are given indices ahead of that.

        Raises:
            StateError: A batch is not made of what its sampler gives at once.
        """
        assert self._indices is not None
        if self._lost:
            return
        while self._indices.first < self._drawn <= self._indices.last:
            self._seen.update(self._indices.pop())
        if self._drawn > self._indices.last or (self._drawn < self._indices.last and not self._loader.num_workers):
            self._lose(
                f"{type(self._loader).__qualname__} has made {self._drawn} batches of {self._indices.last} that its "
                "sampler gave, so its position is not known: let it give one for each, or use a DataLoader"
            )

    def _lose(self, reason: str) -> None:
        """The position is not known from here on.

        Raises:
            StateError: Nobody else hears of that, or it was to be found again.
        """
        error = StateError(reason)
        if excuses.hear is None or self._target is not None:
            raise error
        self._lost = True
        excuses.hear(error)

    def _arrive(self) -> None:
        """End to go back to the position, if this is it."""
        at = self._target
        if at is None or (self._drawn < at["drawn"] and not self._finished):
            return
        if (self._drawn, self._seen.hexdigest()) != (at["drawn"], at["seen"]):
            raise StateError(
                f"the loader of {type(self._loader.dataset).__qualname__} does not give the first {at['drawn']} "
                "batches of this epoch again: their order depends on more than the generators of Python, NumPy and "
                "torch and those of loader, samplers and dataset. Seed it where its iterator begins"
            )
        self._target = None


class _Indices(Iterator[Any]):
    """Stands for a sampler, and keeps what it gave until that is popped.

    Attributes:
        is_read: Whether an iterator of it was asked for.
        first: How many elements were popped.
        last: How many it gave.
    """

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self._given: deque[bytes] = deque()
        self.is_read = False
        self.first = self.last = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        self._iterator = iter(self._sampler)
        self.is_read = True
        return self

    def __next__(self) -> Any:
        indices = next(self._iterator)
        self._given.append(repr(indices).encode())
        self.last += 1
        return indices

    def drop(self, count: int) -> int:
        """Pass over the next `count` elements, and return how many there were."""
        return sum(next(self, _END) is not _END for _ in range(count))

    def pop(self) -> bytes:
        """Return the first element that was not popped before."""
        self.first += 1
        return self._given.popleft()


def _check(loader: Any) -> None:
    if not isinstance(loader, DataLoader):
        raise StateError(
            f"{type(loader).__qualname__} is not a torch.utils.data.DataLoader, so its position is not known: "
            "give a DataLoader"
        )
    if loader.num_workers and loader.persistent_workers:
        raise StateError(
            "persistent_workers=True: the workers' random states go on from epoch to epoch, and no checkpoint has "
            "them. Use persistent_workers=False"
        )
    if loader.num_workers and not getattr(loader, "in_order", True):
        raise StateError("in_order=False: the order of batches depends on the time. Use in_order=True")


def _generators(loader: Any) -> dict[str, torch.Generator]:
    """Return the generators of a loader, its samplers and its dataset, by the way to them."""
    found: dict[str, torch.Generator] = {}
    remaining = [("", loader)]
    seen: set[int] = set()
    while remaining:
        path, owner = remaining.pop()
        if owner is None or id(owner) in seen:
            continue
        seen.add(id(owner))
        generator = getattr(owner, "generator", None)
        if isinstance(generator, torch.Generator) and not any(generator is other for other in found.values()):
            found[f"{path}generator"] = generator
        remaining += [
            (f"{path}{name}.", getattr(owner, name, None)) for name in ("dataset", "batch_sampler", "sampler")
        ]
    return found


def _short(name: str) -> str:
    return name.replace("batch_sampler.", "")


def _set_generators(loader: Any, states: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Set the generators that are there, and return the states of the others."""
    generators = _generators(loader)
    for name in generators.keys() & states.keys():
        generators[name].set_state(states[name])
    return {name: state for name, state in states.items() if name not in generators}


def _digest(seen: Any, batch: Any) -> None:
    """Add the content of a batch to a digest."""
    if isinstance(batch, torch.Tensor):
        seen.update(f"{batch.dtype} {tuple(batch.shape)}".encode())
        plain = bytes_of(batch)
        seen.update(memory(plain.data_ptr(), len(plain)))
    elif isinstance(batch, np.ndarray):
        seen.update(f"{batch.dtype} {batch.shape}".encode())
        seen.update(repr(batch.tolist()).encode() if batch.dtype.hasobject else np.ascontiguousarray(batch).tobytes())
    elif isinstance(batch, Mapping):
        for key, value in batch.items():
            seen.update(repr(key).encode())
            _digest(seen, value)
    elif isinstance(batch, list | tuple):
        seen.update(f"{len(batch)}".encode())
        for value in batch:
            _digest(seen, value)
    elif isinstance(batch, str | bytes | int | float | None):
        seen.update(repr(batch).encode())


def _same(one: Any, other: Any) -> bool:
    """Tell whether two results of `get_rng` are the same."""
    if isinstance(one, dict):
        return all(_same(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    return np.array_equal(one, other) if isinstance(one, np.ndarray) else bool(one == other)
