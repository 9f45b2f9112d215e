"""`resilientctl rollback`: let a run go back to an older step that is at hand."""

import asyncio
import time
from contextlib import aclosing
from typing import NoReturn

import click

from resilient_run.ckpt.errors import CheckpointError, DaemonError
from resilient_run.ckpt.format.pair import Pair, is_import, pair_value

from ..base.settings import Settings
from ..etcd.client import Etcd, EtcdConfig, EtcdError
from ..run import keys
from ..run.life import Life, Transaction
from ..run.mirror import Mirror, of, pair_of_entry, parse_pairs
from ..run.records import Failure
from ..run.rounds import Round
from ..tier.persist_plan import PersistAnswer, PersistRequest
from ..tier.tier import Tier, TierError, call
from .drain import timeout_option
from .etcd import check_run_id, etcd_of, etcd_options
from .export import job_of, target_option

_NAMED = 20


@click.command()
@click.argument("run_id")
@click.option("--to", "step", type=click.IntRange(min=0), required=True, help="The step.")
@target_option
@timeout_option
@etcd_options(of_run=True)
@click.pass_obj
def rollback(
    settings: Settings,
    run_id: str,
    step: int,
    target: str | None,
    timeout_s: float,
    etcd_endpoint: str | None,
    etcd_conf: str,
) -> None:
    """Restart the run RUN_ID from a committed step that is in memory or in the persistent tier.

    Later steps no longer count. It ends after the next commit.
    """
    check_run_id(run_id, "RUN_ID")
    try:
        url = target or (job_of(settings, run_id).get("persist") or {}).get("target")
        tier = None if url is None else Tier(url, run_id)
        config = etcd_of(settings, run_id, etcd_endpoint, etcd_conf)
        done = asyncio.run(_Rollback(run_id, step, tier).run(config, timeout_s))
    except TimeoutError:
        raise click.ClickException(
            f"run {run_id!r} has committed nothing after step {step} within {timeout_s:g} s: see `resilientctl status` "
            "and the output of the launchers"
        ) from None
    except (EtcdError, CheckpointError, OSError) as error:
        raise click.ClickException(str(error)) from error
    click.echo(done)


class _Rollback:
    """The way of one run back to `step`, of which `tier` may have a capture."""

    def __init__(self, run_id: str, step: int, tier: Tier | None) -> None:
        self._run_id = run_id
        self._step = step
        self._tier = tier
        self._mirror = Mirror(
            {
                keys.WATERMARK: pair_of_entry,
                keys.PERSIST: of(PersistRequest),
                keys.OLDER: lambda entry: parse_pairs(entry.value),
            },
            {keys.ANSWERS: (str, of(PersistAnswer))},
        )

    async def run(self, config: EtcdConfig, timeout_s: float) -> str:
        """Carry it out, and return what to tell once something is committed after it.

        Raises:
            DaemonError: The run does not run, or not all ranks can restore that step.
            TierError: The persistent tier does not answer.
            TimeoutError: Nothing was committed in time.
            EtcdError: etcd cannot be reached or refuses.
        """
        etcd = await Etcd.connect(config, prefix=keys.prefix(self._run_id))
        broken: int | None = None
        try:
            async with asyncio.timeout(timeout_s), aclosing(etcd.changes()) as states:
                async for changes in states:
                    self._mirror.apply(changes)
                    round_: Round | None = self._mirror.get(keys.ROUND)
                    life = Life.of(self._mirror)
                    if round_ is None or life is None or life.job.closed is not None:
                        raise DaemonError(f"etcd has no running run {self._run_id!r}; check RUN_ID")
                    watermark = self._mirror.get(keys.WATERMARK)
                    if broken is None:
                        broken = await self._order(etcd, life, round_)
                    elif watermark is not None and broken < round_.generation == watermark[0]:
                        return (
                            f"run {self._run_id!r} went back to step {self._step}: generation {round_.generation} has "
                            f"committed step {watermark[1]}"
                        )
        finally:
            await etcd.close()
        raise DaemonError("etcd ended the watch")

    async def _order(self, etcd: Etcd, life: Life, round_: Round) -> int | None:
        """Move the watermark and break the generation in one transaction; None where that must wait, or was too late.

        Returns:
            The broken generation.
        """
        seen, generation = self._mirror, round_.generation
        request: PersistRequest | None = seen.get(keys.PERSIST)
        if request is not None and not self._is_settled(request):
            return None  # else it may be published later, and the pair to go back to deleted
        watermark: Pair | None = seen.get(keys.WATERMARK)
        # Which older ones all hosts hold is known once they hold something of this generation.
        is_known = watermark is not None and watermark.generation == generation
        in_memory: tuple[Pair, ...] = seen.get(keys.OLDER, ()) if is_known else ()
        pair = self._chosen(watermark, in_memory)
        if pair is None:
            if not is_known and self._step in {older.step for older in round_.older}:
                return None
            self._refuse(watermark, in_memory)
        # No capture of this generation is one that comes next: none is committed over what is restored.
        puts = {
            keys.FAILURES(generation): self._failure(round_).to_value(),
            keys.NEXT: pair_value(Pair(generation + 1, pair.step + 1)),
        }
        guarded = [keys.ROUND, keys.FAILURES(generation), keys.PERSIST, keys.PERSISTED]
        if pair == watermark:
            guarded.append(keys.WATERMARK)
        else:
            guarded.append(keys.OLDER)
            ranks = round_.world_size if pair in in_memory else await self._made_by(pair, life, round_)
            puts[keys.WATERMARK], puts[keys.COMMITTED] = pair_value(pair), {"world_size": ranks}
        # Also where nothing is left out: what was published before is then not written again. Nor is a later step
        # published anew, of which the answers are gone.
        puts[keys.PERSISTED] = {"pairs": [other for other in seen.get(keys.PERSISTED, ()) if other <= pair]}
        # Before the order: whatever ends this command, a run that went back has no later step in the tier.
        await self._take_back(pair)
        guards = {**life.guard, **{key: seen.revisions.get(key, 0) for key in guarded}}
        change = Transaction(guards=guards, puts=puts, deletes=(keys.PERSIST, keys.ANSWERS()))
        done = await etcd.commit(*change)
        return generation if done else None

    def _chosen(self, watermark: Pair | None, in_memory: tuple[Pair, ...]) -> Pair | None:
        """Return the newest pair of the step that every rank can restore, None without one."""
        pairs = (*self._mirror.get(keys.PERSISTED, ()), *in_memory, watermark)
        return max((pair for pair in pairs if pair is not None and pair.step == self._step), default=None)

    def _refuse(self, watermark: Pair | None, in_memory: tuple[Pair, ...]) -> NoReturn:
        persisted: tuple[Pair, ...] = self._mirror.get(keys.PERSISTED, ())
        memory = () if watermark is None else (*in_memory, watermark)
        raise DaemonError(
            f"step {self._step} is not at hand; these are: {_steps(*memory)} in memory, {_steps(*persisted)} in the "
            "persistent tier"
        )

    async def _made_by(self, pair: Pair, life: Life, round_: Round) -> int | None:
        """Return how many ranks captured a pair of the tier, which must be whole; None for an import.

        Raises:
            DaemonError: The run cannot restore it.
        """
        if self._tier is None:
            raise DaemonError(f"run {self._run_id!r} has no persistent tier here; give --target")
        await call(self._tier, self._tier.check_whole, pair)
        if is_import(pair):
            return None
        ranks = (await call(self._tier, self._tier.manifest, pair)).world_size
        if ranks != round_.world_size and life.job.elastic_s is None:
            raise DaemonError(
                f"{ranks} ranks made step {pair[1]}, and the run has {round_.world_size}: without --rr-elastic only as "
                "many can restore it"
            )
        return ranks

    async def _take_back(self, pair: Pair) -> None:
        """Let nothing that was published after `pair` count.

        Raises:
            DaemonError: The storage refuses.
        """
        if self._tier is None:
            return
        for other in await call(self._tier, self._tier.published):
            if other <= pair:
                continue
            try:
                await call(self._tier, self._tier.refuse, other)
            except TierError as error:
                raise DaemonError(
                    f"the run does not go back: {self._tier.shown_pair(other)} would still count ({error}); delete it"
                ) from error

    def _is_settled(self, request: PersistRequest) -> bool:
        answers = self._mirror.folders[keys.ANSWERS].values()
        failed = any(answer.pair == request.pair and answer.error is not None for answer in answers)
        return failed or request.pair in self._mirror.get(keys.PERSISTED, ())

    def _failure(self, round_: Round) -> Failure:
        return Failure(
            generation=round_.generation,
            kind="rollback",
            began_step=round_.began_step,
            unix_s=time.time(),
            message=f"`resilientctl rollback` to step {self._step}",
        )


def _steps(*pairs: Pair) -> str:
    return ", ".join(str(pair.step) for pair in pairs[-_NAMED:]) or "none"
