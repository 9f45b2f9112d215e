"""What the launchers of a run agree on before the first round: its size, script and secret, and where it begins."""

import asyncio
import logging
import secrets
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace

from torch.distributed.elastic.rendezvous import RendezvousStateError

from resilient_run.ckpt.format.pair import Pair, is_import
from resilient_run.daemon.etcd.client import Etcd
from resilient_run.daemon.run import keys
from resilient_run.daemon.run.life import Life, begin, sweep
from resilient_run.daemon.run.mirror import Mirror
from resilient_run.daemon.run.records import Agreement, Requirements

log = logging.getLogger(__name__)

_HASH_LETTERS = 12
_MAY_DIFFER = frozenset({"user", "script", "arguments", "torch"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Terms(Requirements):
    """What one launcher asks of the run.

    Attributes:
        allow_different: Whether it joins a run of another user, script, arguments or torch all the same.
        persisted: Returns the published pairs of the run id, oldest first (an import counts as the oldest), and by how
            many ranks the newest was made, None for an import: a run that etcd does not know begins with that one.
            Called in a thread.
    """

    allow_different: bool = False
    persisted: Callable[[], tuple[list[list[int]], int | None]] = lambda: ([], None)


async def agree(etcd: Etcd, run_id: str, terms: Terms, *, abandoned: bool) -> Life | None:
    """Return the life of the run; it begins now if there is none, or the last one has ended.

    Returns None while launchers of that last one are still there. Terms of a run that has ended or is `abandoned`, that
    has left no launcher behind, bind nobody; what it committed is still its.

    Raises:
        RendezvousStateError: The run goes on with other terms, or nobody can tell where it begins.
        EtcdError: etcd cannot be reached or refuses.
    """
    while True:
        mirror = await look(etcd)
        if (damage := mirror.ignored.get(keys.JOB)) is not None:
            raise RendezvousStateError(f"etcd key {etcd.prefix}{keys.JOB} is damaged ({damage}); delete it")
        if (life := Life.of(mirror)) is None:
            await etcd.commit(*sweep())
            if not await _begin(etcd, run_id, terms) and await etcd.get(keys.JOB) is None:
                return None
            continue
        if not life.revision:
            raise RendezvousStateError(
                f"run {run_id!r} in etcd was started by another version, or one of its keys was deleted: "
                "`resilientctl forget` it, or choose another --rdzv-id"
            )
        job, openings = life.job, life.openings(terms, abandoned=abandoned)
        if any([await etcd.commit(*transaction) for transaction in openings]):
            continue
        if job.closed is not None:
            return None
        ours = replace(job, **terms.required())
        if ours == job:
            return life
        if Life.of(await look(etcd)) != life:
            continue
        theirs, own = _described(job), _described(ours)
        # The hash of arguments is made with the run key, so it says nothing where that differs.
        same_key = theirs["key"] == own["key"]
        differing = [name for name in theirs if theirs[name] != own[name] and (same_key or name != "arguments")]
        may_differ = _MAY_DIFFER.issuperset(differing)
        if may_differ and terms.allow_different:
            return life
        raise RendezvousStateError(
            f"run {run_id!r} goes on with {', '.join(theirs[name] for name in differing)}, but this launcher has "
            f"{', '.join(own[name] for name in differing)}: start every launcher of a run with the same values, or "
            f"choose another --rdzv-id{', or give this one --rr-allow-different-script' if may_differ else ''}"
        )


async def look(etcd: Etcd) -> Mirror:
    """Return what etcd has of the life of a run, read at once."""
    return Mirror().apply(await etcd.list(keys.JOB))


async def _begin(etcd: Etcd, run_id: str, terms: Terms) -> bool:
    """Make the job of a run that etcd does not know, unless another launcher was first or is in it, and tell."""
    pairs, world_size = await asyncio.to_thread(terms.persisted)
    newest = Pair(*pairs[-1]) if pairs else Pair(0, 0)
    job = Agreement(
        incarnation=uuid.uuid4().hex,
        token=secrets.token_hex(16),
        after_generation=newest.generation,
        **terms.required(),
    )
    begun = await etcd.commit(*begin(job, pairs, world_size)) > 0
    if begun and pairs:
        what = "imported" if is_import(newest) else "persisted"
        log.warning("run %r begins with the %s step %d", run_id, what, newest.step)
    return begun


def _described(job: Requirements) -> dict[str, str]:
    """Return, for people, what launchers must have in common, by what it is."""
    known = job.fingerprint
    return {
        "bounds": f"--nnodes={job.min_nodes}:{job.max_nodes}",
        "elastic": "no --rr-elastic" if job.elastic_s is None else f"--rr-elastic={job.elastic_s:g}",
        "sizes": f"--rr-sizes={','.join(map(str, job.sizes))}" if job.sizes else "no --rr-sizes",
        "keep": f"replication.keep={job.keep}",
        # Daemons with different keys would not let each other in.
        "key": f"the run key with proof {_shortened(job.key_proof)}" if job.key_proof else "no run key",
        "user": f"user {known.user or 'unknown'}",
        "script": f"script {known.script or 'unknown'} (sha256 {_shortened(known.content)})",
        "arguments": f"arguments of sha256 {_shortened(known.arguments)}",
        "torch": f"torch {known.torch or 'unknown'}",
        "formats": f"formats of resilient-run {known.formats or 'unknown'}",
    }


def _shortened(sha256: str) -> str:
    return sha256[:_HASH_LETTERS] or "unknown"
