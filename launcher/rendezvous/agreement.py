"""What the launchers of a run agree on before the first round: its size, script and secret, and where it begins."""

import asyncio
import logging
import secrets
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace

from torch.distributed.elastic.rendezvous import RendezvousStateError

from resilient_run.ckpt.errors import DaemonError
from resilient_run.ckpt.format.pair import Pair, is_import, pair_value
from resilient_run.daemon.etcd.client import Entry, Etcd
from resilient_run.daemon.run import keys
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


async def agree(etcd: Etcd, run_id: str, terms: Terms, *, abandoned: bool) -> Entry:
    """Return the run's job, made now if there is none, with what it is to restore.

    Terms of a run that is `abandoned`, that has left no launcher behind, bind nobody; what it committed is still its.

    Raises:
        RendezvousStateError: The run goes on with other terms, or nobody can tell where it begins.
        EtcdError: etcd cannot be reached or refuses.
    """
    prefix = keys.prefix(run_id)
    key, members = prefix + keys.JOB, prefix + keys.MEMBERS()
    while True:
        entry = await etcd.get(key)
        if entry is None:
            if not await _begin(etcd, run_id, prefix, terms) and await etcd.get(key) is None:
                raise RendezvousStateError(
                    f"etcd key {key} was removed during the run; start this one when the others have written it again"
                )
            continue
        try:
            job = Agreement.parse(entry.value)
        except DaemonError as error:
            raise RendezvousStateError(f"etcd key {key} is damaged ({error}); delete it") from error
        ours = replace(job, **terms.required())
        if ours == job:
            return entry
        if abandoned and await etcd.commit({key: entry.revision, members: 0}, {key: ours.to_value()}):
            continue
        if (again := await etcd.get(key)) is None or again.revision != entry.revision:
            continue
        theirs, own = _described(job), _described(ours)
        differing = [name for name in theirs if theirs[name] != own[name]]
        may_differ = _MAY_DIFFER.issuperset(differing)
        if may_differ and terms.allow_different:
            return entry
        raise RendezvousStateError(
            f"run {run_id!r} goes on with {', '.join(theirs[name] for name in differing)}, but this launcher has "
            f"{', '.join(own[name] for name in differing)}: start every launcher of a run with the same values, or "
            f"choose another --rdzv-id{', or let this one in with --rr-allow-different-script' if may_differ else ''}"
        )


async def _begin(etcd: Etcd, run_id: str, prefix: str, terms: Terms) -> bool:
    """Make the job of a run that etcd does not know, unless another launcher was first or is in it, and tell."""
    pairs, world_size = await asyncio.to_thread(terms.persisted)
    newest = Pair(*pairs[-1]) if pairs else Pair(0, 0)
    job = Agreement(
        incarnation=uuid.uuid4().hex,
        token=secrets.token_hex(16),
        after_generation=newest.generation,
        **terms.required(),
    )
    puts = {keys.JOB: job.to_value()}
    if pairs:
        puts[keys.WATERMARK] = pair_value(newest)
        puts[keys.PERSISTED] = {"pairs": pairs}
        puts[keys.COMMITTED] = {"world_size": world_size}
    guards = {prefix + keys.JOB: 0, prefix + keys.MEMBERS(): 0}
    begun = await etcd.commit(guards, {prefix + key: value for key, value in puts.items()}) > 0
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
