"""The past that the page draws: the steps of each run, thinned so that days take no more than minutes."""

from typing import Any, Final

_MOST: Final = 240
_PERIOD_S: Final = 2.0

_Key = tuple[str, str]
_Point = tuple[float, int | None, int | None]


class History:
    """Newest completed and newest committed step of each run, since the exporter was started.

    Launchers of one run that share a machine are several hosts at one daemon, so a run is told by its host, too.
    """

    def __init__(self) -> None:
        self._points: dict[_Key, list[_Point]] = {}
        self._period_s: dict[_Key, float] = {}

    def add_to(self, status: dict[str, Any], now_unix_s: float) -> None:
        """Note where the runs of `status` are, and give each its `history`: `[unix_s, step, committed step]` each.

        The last one is of now. Once a run has 240 points, every other one is dropped, and new ones come half as often.
        What is not in `status` is forgotten, and so is what a clock that was set back would have in the future.
        """
        jobs = {(job["run_id"], job["host"]): job for job in status["jobs"] if "generation" in job}
        self._points = {key: self._points.get(key, []) for key in jobs}
        self._period_s = {key: self._period_s.get(key, _PERIOD_S) for key in jobs}
        now_unix_s = round(now_unix_s, 1)
        for key, job in jobs.items():
            points = self._points[key]
            committed = None if job["watermark"] is None else job["watermark"]["step"]
            now = now_unix_s, max(job["last_steps"].values(), default=None), committed
            while points and points[-1][0] > now_unix_s:
                points.pop()
            job["history"] = [*points, now]
            if not points or now_unix_s >= points[-1][0] + self._period_s[key]:
                points.append(now)
            if len(points) > _MOST:
                del points[1::2]
                self._period_s[key] *= 2
