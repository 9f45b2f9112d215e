"""What this host knows of its ranks' digests: what its report to the root says of them, and what peers may ask."""

import base64
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import xxhash

from resilient_run.ckpt import digests
from resilient_run.ckpt.digests import MAX_DIGESTS, Digests
from resilient_run.ckpt.errors import DaemonError, SlotError

from .fetch import Peer, PeerError
from .fields import Fields
from .lesson import Mask
from .rounds import Pair
from .slots import JobSlots
from .view import JobView

_KEPT_STRUCTURES = 64
_KEPT_PAIRS = 8
"""Of so many captures of a rank the digests are kept: the root asks for them a moment after they were reported."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """What a host reports of one capture of one of its ranks.

    Attributes:
        structure: Name of the structure, 16 hexadecimal digits.
        mask: Name of the mask that `digest` was made with, "" when the host knows of none for that structure.
        digest: Of all leaves that must be equal, 16 hexadecimal digits.
    """

    structure: str
    mask: str
    digest: str


Claims = Mapping[Pair, Mapping[int, Claim]]


def parse_claims(value: Mapping[str, Any]) -> dict[Pair, dict[int, Claim]]:
    """Return what the `digests` of a `ckpt/held/<host>` value say.

    Raises:
        DaemonError: They are malformed.
    """
    claims: dict[Pair, dict[int, Claim]] = {}
    try:
        for rank, rows in value.get("digests", {}).items():
            for generation, step, structure, mask, digest in rows:
                claim = Claim(structure=str(structure), mask=str(mask), digest=str(digest))
                claims.setdefault((int(generation), int(step)), {})[int(rank)] = claim
    except (AttributeError, TypeError, ValueError) as error:
        raise DaemonError(f"ckpt/held: field 'digests' is malformed: {error!r}") from error
    return claims


@dataclass(frozen=True, kw_only=True, slots=True)
class EqualLeaves:
    """Which leaves of a structure must be equal on all ranks that have it: a `ckpt/equal/<structure>` value.

    Attributes:
        generation: In which that was learned.
        mask: An entry per digest.
        name: Of the mask.
    """

    generation: int
    mask: Mask
    name: str

    @classmethod
    def of(cls, generation: int, mask: Mask) -> Self:
        """Return what `mask` says in `generation`."""
        name = f"{xxhash.xxh3_64_intdigest(np.packbits(mask).tobytes()):016x}"
        return cls(generation=generation, mask=mask, name=name)

    @classmethod
    def parse(cls, key: str, value: Mapping[str, Any]) -> Self:
        """Return what `to_value` wrote.

        Raises:
            DaemonError: The value is none.
        """
        fields = Fields(value, key)
        count = fields.integer("count", high=MAX_DIGESTS)
        bits = np.unpackbits(np.frombuffer(fields.binary("leaves") if count else b"", dtype=np.uint8), count=count)
        return cls.of(fields.integer("generation"), bits.astype(np.bool_))

    def to_value(self) -> dict[str, Any]:
        """Return the etcd value."""
        leaves = base64.b64encode(np.packbits(self.mask).tobytes()).decode()
        return {"generation": self.generation, "count": len(self.mask), "leaves": leaves}


class HostDigests:
    """The digests of the captures of this host's ranks, and access to those of others.

    Args:
        view: What is known of the job.
        slots: What this host holds of it: the digests are in the manifests.
        find_peer: Returns the daemon of a host, None when it is not registered.

    Attributes:
        equal: What the root has learned, by structure; None while that is not known yet.
    """

    def __init__(self, view: JobView, slots: JobSlots, find_peer: Callable[[str], Awaitable[Peer | None]]) -> None:
        self.equal: dict[str, EqualLeaves] | None = None
        self._view = view
        self._slots = slots
        self._find_peer = find_peer
        self._known: dict[int, dict[Pair, Digests]] = {}
        self._names: dict[int, list[str]] = {}

    def report(self) -> dict[str, Any]:
        """Return the `digests` of this host's report: of what its ranks captured in this generation and it holds."""
        held, rows = self._slots.held(), dict[str, Any]()
        for rank in self._view.own_ranks:
            pairs = sorted(pair for pair in held.get(rank, ()) if pair[0] == self._view.generation)
            found = [row for pair in pairs if (row := self._row(rank, pair)) is not None]
            if found:
                rows[str(rank)] = found
        return rows

    def find(self, rank: int, pair: Pair) -> Digests | None:
        """Return the digests of the capture `pair` of the own `rank`, None when they are gone."""
        known = self._known.setdefault(rank, {})
        file = self._slots.find(rank, pair)
        if pair not in known and file is not None:
            try:
                header = file.slot.header()
                manifest = file.slot.manifest()
                if (header.generation, header.step) != pair or file.slot.header() != header:
                    return None
                known[pair] = found = Digests.parse(manifest)
                if found.structure not in self._names:
                    self._names[found.structure] = digests.names(manifest)
                    for oldest in list(self._names)[:-_KEPT_STRUCTURES]:
                        del self._names[oldest]
            except SlotError:
                return None
            for old in sorted(known)[:-_KEPT_PAIRS]:
                del known[old]
        return known.get(pair)

    def answer(self, rank: int, pair: Pair, wanted: Sequence[int]) -> dict[str, Any] | None:
        """Return the answer to a peer's `digests`, None when they are gone."""
        found = self.find(rank, pair)
        if found is None or any(index >= len(found.values) for index in wanted):
            return None
        named = self._names.get(found.structure, [])
        return {
            "structure": f"{found.structure:016x}",
            "digests": base64.b64encode(found.values.tobytes()).decode(),
            "names": [named[index] for index in wanted],
        }

    async def ask(self, rank: int, pair: Pair, wanted: Sequence[int] = ()) -> tuple[Digests, list[str]] | None:
        """Return the digests of a capture of any rank of the round and the names of the `wanted`, None when gone.

        Raises:
            PeerError: The host that runs the rank cannot be asked.
        """
        round_ = self._view.round
        host = None if round_ is None else next((host for host in round_.hosts if rank in round_.ranks(host)), None)
        if host is None:
            return None
        if host == self._view.host:
            answer = self.answer(rank, pair, wanted)
        else:
            peer = await self._find_peer(host)
            if peer is None:
                raise PeerError(f"the daemon of host {host} is not registered")
            answer = await peer.digests(rank, pair, wanted)
        if answer is None:
            return None
        fields = Fields(answer, f"digests of host {host}")
        try:
            values = np.frombuffer(fields.binary("digests", max_bytes=8 * MAX_DIGESTS), dtype="<u8")
            found = Digests(structure=int(fields.text("structure"), 16), values=values)
        except (ValueError, DaemonError) as error:
            raise PeerError(f"host {host} sent no digests: {error}") from error
        return found, [str(name) for name in answer.get("names", ())]

    def _row(self, rank: int, pair: Pair) -> list[Any] | None:
        found = self.find(rank, pair)
        if found is None or not len(found.values):
            return None
        structure = f"{found.structure:016x}"
        equal = (self.equal or {}).get(structure)
        if equal is None or equal.generation != self._view.generation or len(equal.mask) != len(found.values):
            return [*pair, structure, "", ""]
        return [*pair, structure, equal.name, f"{found.combined(equal.mask):016x}"]
