"""The past that the page draws: the steps of each run, thinned so that days take no more than minutes."""

from typing import Any, Final

_MOST: Final = 240
_PERIOD_S: Final = 2.0


class History:
    """Newest completed and newest committed step of each run, since the exporter was started."""

    def __init__(self) -> None:
        self._points: dict[str, list[list[float | None]]] = {}
        self._period_s: dict[str, float] = {}

    def add_to(self, status: dict[str, Any], now_unix_s: float) -> None:
        """Note where the runs of `status` are, and give each its `history`: `[unix_s, step, committed step]` each.

        Once a run has 240 points, every other one is dropped, and new ones come half as often. What is not in
        `status` is forgotten.
        """
        jobs = {job["run_id"]: job for job in status["jobs"] if "generation" in job}
        self._points = {run_id: self._points.get(run_id, []) for run_id in jobs}
        self._period_s = {run_id: self._period_s.get(run_id, _PERIOD_S) for run_id in jobs}
        for run_id, job in jobs.items():
            points = self._points[run_id]
            if not points or now_unix_s >= (points[-1][0] or 0.0) + self._period_s[run_id]:
                committed = None if job["watermark"] is None else job["watermark"]["step"]
                points.append([round(now_unix_s, 1), max(job["last_steps"].values(), default=None), committed])
            if len(points) > _MOST:
                del points[1::2]
                self._period_s[run_id] *= 2
            job["history"] = list(points)
