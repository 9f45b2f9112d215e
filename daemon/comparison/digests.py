"""What this host knows of its ranks' digests: what its reports say of them, and what peers may ask."""

import base64
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Self

import numpy as np
import xxhash

from resilient_run.ckpt.errors import DaemonError, SlotError
from resilient_run.ckpt.format import digests
from resilient_run.ckpt.format.digests import MAX_DIGESTS, U64
from resilient_run.ckpt.format.pair import Pair

from ..base.fields import Fields
from ..peers.fetch import Peer, PeerError
from ..run import keys
from ..run.report import Claims, DigestClaim, Runs, joined
from ..run.view import JobView
from ..slots.slots import JobSlots
from .lesson import Mask

_KEPT_PAIRS = 8
"""Of so many captures of a rank the digests are kept: the root asks for them a moment after they were reported."""


_NO_CLAIM = DigestClaim(mask="", digest="")


@dataclass(frozen=True, kw_only=True, slots=True)
class EqualLeaves:
    """Which leaves of a structure must be equal on all ranks that have it.

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
    def parse(cls, value: Mapping[str, Any]) -> Self:
        """Return what `to_value` wrote.

        Raises:
            DaemonError: The value is none.
        """
        fields = Fields(value, keys.EQUAL)
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
        self._known: dict[int, dict[Pair, dict[str, U64]]] = {}
        self._claimed: dict[tuple[int, Pair, str], tuple[EqualLeaves | None, DigestClaim]] = {}
        self._names: dict[str, list[str]] = {}

    def clear(self) -> None:
        """Forget all captures: another life of the run begins."""
        self._known.clear()
        self._claimed.clear()

    def claims(self, pairs: Iterable[Pair]) -> Claims:
        """Return what the ranks of this host claim of the digests of these pairs."""
        pairs = list(pairs)
        found: dict[Pair, dict[str, dict[DigestClaim, Runs]]] = {pair: {} for pair in pairs}
        # Asked for again and again between two captures.
        before, self._claimed = self._claimed, {}
        for rank, pair in product(self._view.own_ranks, pairs):
            for structure, values in (self.find(rank, pair) or {}).items():
                equal, key = self._equal(structure, values), (rank, pair, structure)
                made_with, claim = before.get(key, (None, _NO_CLAIM))
                if equal is not made_with:
                    claim = _NO_CLAIM if equal is None else _claim(values, equal)
                self._claimed[key] = equal, claim
                claims = found[pair].setdefault(structure, {})
                claims[claim] = joined(*claims.get(claim, ()), (rank, rank))
        return found

    def find(self, rank: int, pair: Pair) -> Mapping[str, U64] | None:
        """Return the digests of the capture `pair` of the own `rank` by structure, None when they are gone."""
        known = self._known.setdefault(rank, {})
        file = self._slots.find(rank, pair)
        if pair not in known and file is not None:
            try:
                header = file.slot.header()
                manifest = file.slot.manifest()
                if header.pair != pair or file.slot.header() != header:
                    return None
                found = digests.parse(manifest)
                if not self._names.keys() >= found.keys():
                    self._names |= digests.names(manifest)
            except SlotError:
                return None
            known[pair] = found
            for old in sorted(known)[:-_KEPT_PAIRS]:
                del known[old]
            kept = {structure for pairs in self._known.values() for found in pairs.values() for structure in found}
            self._names = {structure: named for structure, named in self._names.items() if structure in kept}
        return known.get(pair)

    def answer(self, rank: int, pair: Pair, structure: str, wanted: Sequence[int]) -> dict[str, Any] | None:
        """Return the answer to a peer's `digests`, None when they are gone."""
        values = (self.find(rank, pair) or {}).get(structure)
        if values is None or any(index >= len(values) for index in wanted):
            return None
        named = self._names[structure]
        return {"digests": base64.b64encode(values.tobytes()).decode(), "names": [named[index] for index in wanted]}

    async def ask(
        self, rank: int, pair: Pair, structure: str, wanted: Sequence[int] = ()
    ) -> tuple[U64, list[str]] | None:
        """Return the digests of a structure in a capture of any rank of the round and the names of the `wanted`.

        None when they are gone.

        Raises:
            PeerError: The host that runs the rank cannot be asked.
        """
        round_ = self._view.round
        host = None if round_ is None else round_.host_of(rank)
        if host is None:
            return None
        if host == self._view.host:
            answer = self.answer(rank, pair, structure, wanted)
        else:
            peer = await self._find_peer(host)
            if peer is None:
                raise PeerError(f"the daemon of host {host} is not registered")
            answer = await peer.digests(rank, pair, structure, wanted)
        if answer is None:
            return None
        fields = Fields(answer, f"digests of host {host}")
        try:
            values = np.frombuffer(fields.binary("digests", max_bytes=8 * MAX_DIGESTS), dtype="<u8")
        except (ValueError, DaemonError) as error:
            raise PeerError(f"host {host} sent no digests: {error}") from error
        return values, [str(name) for name in answer.get("names", ())]

    def _equal(self, structure: str, values: U64) -> EqualLeaves | None:
        """Return what must be equal in captures of this generation, None while that is not known."""
        equal = (self.equal or {}).get(structure)
        fits = equal is not None and equal.generation == self._view.generation and len(equal.mask) == len(values)
        return equal if fits else None


def _claim(values: U64, equal: EqualLeaves) -> DigestClaim:
    return DigestClaim(mask=equal.name, digest=digests.combined(values, equal.mask))
