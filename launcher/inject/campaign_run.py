"""Carries out the plan of a campaign on a living run, and writes down what each fault led to."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from resilient_run.daemon.run.faults import KINDS

from .campaign import Campaign, PlannedFault
from .injection import Injection, InjectionError, Outcome

log = logging.getLogger(__name__)

_LOOK_S = 0.5
_EVENT_S = 5.0
_STEPS_SINCE = 2
"""A fault is recovered from once so many more steps are committed than were completed when it struck: the step that
was being captured then may still be committed by what is already dying."""


class CampaignRun:
    """One campaign on one run.

    Args:
        injection: The run.
        campaign: What the file says.
        plan: The faults in order.
        say: Hears one line per fault.
    """

    def __init__(
        self, injection: Injection, campaign: Campaign, plan: Sequence[PlannedFault], say: Callable[[str], None]
    ) -> None:
        self._injection = injection
        self._limits = campaign.limits
        self._plan = plan
        self._say = say
        self._begun_s = time.monotonic()
        self._costly: set[asyncio.Task[None]] = set()
        self.entries: list[dict[str, Any]] = []
        """What was found, one entry per fault that was ordered."""

    async def run(self) -> None:
        """Let every planned fault strike; ends early when the run ends or does not recover."""
        self._begun_s = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for planned in self._plan:
                await self._moment(planned)
                if self._injection.sight.ended or any(entry["recovered"] is False for entry in self.entries):
                    break
                task = group.create_task(self._one(planned))
                if KINDS[planned.kind].costs_a_host:
                    self._costly.add(task)
                    task.add_done_callback(self._costly.discard)
                if self._limits.wait_for_recovery:
                    await asyncio.wait([task])

    async def _moment(self, planned: PlannedFault) -> None:
        if planned.at_s is not None:
            await asyncio.sleep(max(0.0, self._begun_s + planned.at_s - time.monotonic()))
        while KINDS[planned.kind].costs_a_host and len(self._costly) >= self._limits.lost_hosts_at_once:
            await asyncio.wait(self._costly, return_when=asyncio.FIRST_COMPLETED)
        limits, step = self._limits, planned.at_step
        if limits.wait_for_recovery:
            await self._injection.wait_for(lambda sight: sight.is_whole, timeout_s=limits.recovery_timeout_s)
        elif step is not None:
            await self._injection.wait_for(lambda sight: sight.step >= step, timeout_s=limits.recovery_timeout_s)

    async def _one(self, planned: PlannedFault) -> None:
        """Order one fault and follow it to the end of its recovery."""
        sight = self._injection.sight
        entry: dict[str, Any] = {**asdict(planned), "recovered": None, "outcome": None}
        self.entries.append(entry)
        host = sight.host_of(planned.rank)
        if host is None:
            entry["error"] = f"no host runs rank {planned.rank}"
            return
        at_step = None
        if planned.at_step is not None:
            at_step = planned.at_step
            if self._limits.wait_for_recovery:
                at_step = max(at_step, sight.step + self._limits.min_distance_steps)
        order = planned.order(host, at_step)
        seen = len(sight.observations)
        try:
            number = await self._injection.order(order)
        except InjectionError as error:
            entry["error"] = str(error)
            return
        answered = await self._injection.wait_for(
            lambda sight: number in sight.outcomes, timeout_s=self._limits.recovery_timeout_s
        )
        if not answered:
            await self._injection.take_back(number)
            entry["error"] = f"host {host} did not carry it out"
            self._say(f"fault {planned.number}: {planned.kind} on host {host}: {entry['error']}")
            return
        outcome = sight.outcomes[number]
        entry["outcome"] = asdict(outcome)
        self._say(f"fault {planned.number}: {planned.kind} on host {host}: {outcome.what}")
        if outcome.ok:
            duration_s = float(getattr(order.parameters, "duration_s", 0.0))
            entry["recovered"] = await self._recovered(outcome, duration_s)
            entry["recovered_after_s"] = round(time.time() - outcome.unix_s, 3)
        entry.update(self._found(outcome, seen))

    async def _recovered(self, outcome: Outcome, duration_s: float) -> bool:
        """Wait for the end of the fault, and then for steps committed by a whole generation."""
        await asyncio.sleep(max(0.0, outcome.unix_s + duration_s - time.time()))
        sight = self._injection.sight
        at_step = max(outcome.step, sight.step) + _STEPS_SINCE
        recovered = await self._injection.wait_for(
            lambda sight: sight.is_whole and sight.step >= at_step, timeout_s=self._limits.recovery_timeout_s
        )
        generation = 0 if sight.round is None else sight.round.generation
        if recovered and generation > outcome.generation:
            await self._injection.wait_for(
                lambda sight: any(done == generation for done, _ in sight.recoveries), timeout_s=_EVENT_S
            )
        # A run that came to its end has recovered too.
        return recovered or sight.ended

    def _found(self, outcome: Outcome, seen: int) -> dict[str, Any]:
        """Return what launchers and daemons said since the fault struck."""
        sight = self._injection.sight
        now = outcome.generation if sight.round is None else sight.round.generation
        recoveries = [
            event
            for (generation, _), event in sorted(sight.recoveries.items())
            if outcome.generation < generation <= now
        ]
        lost = [event["steps_lost"] for event in recoveries if event.get("steps_lost") is not None]
        return {
            "generation_after": now,
            "detected": [
                {"generation": generation, **sight.failures[generation]}
                for generation in range(outcome.generation, now)
                if generation in sight.failures
            ],
            "observations": sight.observations[seen:],
            "recoveries": recoveries,
            "steps_lost": max(lost, default=0),
        }
