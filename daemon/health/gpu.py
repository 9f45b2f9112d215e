"""The GPUs of this host as NVIDIA's driver sees them: XID and memory errors, NVLink, temperature (extra `nvml`)."""

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from ..base.policy import DetectPolicy
from .threshold import Measure

log = logging.getLogger(__name__)

APPLICATION_XIDS = frozenset({13, 31, 43, 45, 68, 109})
"""XIDs that a faulty program causes on a healthy GPU; its exit says all that is to say."""


class Gpus:
    """Watches every GPU from its construction on: what had gone wrong before does not count.

    Not safe to use from several threads at once.

    Args:
        nvml: The module `pynvml`, with `nvmlInit` done.
        policy: The thresholds.
    """

    def __init__(self, nvml: Any, policy: DetectPolicy) -> None:
        self._nvml = nvml
        self._policy = policy
        self._devices = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        self._xids: Counter[tuple[int, int]] = Counter()
        self._events = self._register()
        self._start = {
            index: (self._ecc_errors(device) or 0, self._link_errors(device))
            for index, device in enumerate(self._devices)
        }

    def measure(self) -> list[Measure]:
        """Measure every GPU now; blocks as long as the driver does."""
        self._collect_xids()
        measures = [
            self._broken(index, f"xid {xid}", count, f"GPU {index} had XID {xid}, {count} time(s)")
            for (index, xid), count in self._xids.items()
        ]
        for index, device in enumerate(self._devices):
            measures += self._measure_device(index, device)
        return measures

    def close(self) -> None:
        """Let the driver go."""
        if self._events is not None:
            self._nvml.nvmlEventSetFree(self._events)
        self._nvml.nvmlShutdown()

    def _measure_device(self, index: int, device: Any) -> Iterator[Measure]:
        nvml, policy = self._nvml, self._policy
        try:
            celsius = self._ask(nvml.nvmlDeviceGetTemperature, device, nvml.NVML_TEMPERATURE_GPU)
            ecc, links, (pending, failed) = self._ecc_errors(device), self._link_errors(device), self._repairs(device)
        except nvml.NVMLError_GpuIsLost:
            yield self._broken(index, "lost", 1, f"GPU {index} has fallen off the bus")
            return
        except nvml.NVMLError as error:
            yield _measure(index, "unknown", 1, f"the driver cannot tell the state of GPU {index}: {error}", warn=1)
            return
        if celsius is not None:
            limits = {"warn": policy.gpu_warn_celsius, "fail": policy.gpu_fail_celsius}
            yield _measure(index, "temperature", celsius, f"GPU {index} is at {celsius} °C", **limits)
        if ecc is not None:
            new = ecc - self._start[index][0]
            yield self._broken(index, "ecc", new, f"GPU {index} had {new} uncorrectable memory error(s)")
        new = links - self._start[index][1]
        limits = {"warn": policy.gpu_nvlink_warn_errors, "fail": policy.gpu_nvlink_fail_errors}
        yield _measure(index, "nvlink", new, f"GPU {index} had {new} NVLink error(s)", **limits)
        yield _measure(index, "pending", pending, f"GPU {index} must be reset to retire faulty memory", warn=1)
        yield self._broken(index, "remapping", failed, f"GPU {index} could not replace faulty memory")

    def _broken(self, index: int, name: str, count: int, message: str) -> Measure:
        """Return the measure of something that a sound GPU never has."""
        return _measure(index, name, count, message, warn=1, fail=1 if self._policy.gpu_broken == "fail" else 0)

    def _register(self) -> Any:
        """Return the set in which the driver collects XIDs, None where it cannot."""
        events = self._ask(self._nvml.nvmlEventSetCreate)
        for device in self._devices if events is not None else ():
            self._ask(self._nvml.nvmlDeviceRegisterEvents, device, self._nvml.nvmlEventTypeXidCriticalError, events)
        return events

    def _collect_xids(self) -> None:
        while self._events is not None:
            try:
                event = self._nvml.nvmlEventSetWait_v2(self._events, 0)
            except self._nvml.NVMLError as error:
                if not isinstance(error, self._nvml.NVMLError_Timeout):
                    log.debug("the driver gives no events: %s", error)
                return
            xid = int(event.eventData)
            if event.eventType == self._nvml.nvmlEventTypeXidCriticalError and xid not in APPLICATION_XIDS:
                self._xids[self._nvml.nvmlDeviceGetIndex(event.device), xid] += 1

    def _ecc_errors(self, device: Any) -> int | None:
        nvml = self._nvml
        kinds = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        count = self._ask(nvml.nvmlDeviceGetTotalEccErrors, device, *kinds)
        return None if count is None else int(count)

    def _link_errors(self, device: Any) -> int:
        """Return the errors of all NVLinks together: CRC, replay and recovery."""
        nvml, total = self._nvml, 0
        for link in range(nvml.NVML_NVLINK_MAX_LINKS):
            if not self._ask(nvml.nvmlDeviceGetNvLinkState, device, link):
                continue
            for counter in (
                nvml.NVML_NVLINK_ERROR_DL_REPLAY,
                nvml.NVML_NVLINK_ERROR_DL_RECOVERY,
                nvml.NVML_NVLINK_ERROR_DL_CRC_FLIT,
                nvml.NVML_NVLINK_ERROR_DL_CRC_DATA,
            ):
                total += self._ask(nvml.nvmlDeviceGetNvLinkErrorCounter, device, link, counter) or 0
        return total

    def _repairs(self, device: Any) -> tuple[int, int]:
        """Return whether faulty memory waits for a reset to be retired, and whether it could not be replaced."""
        rows = self._ask(self._nvml.nvmlDeviceGetRemappedRows, device)
        if rows is not None:
            _, _, pending, failed = rows
            return int(pending), int(failed)
        return int(self._ask(self._nvml.nvmlDeviceGetRetiredPagesPendingStatus, device) or 0), 0

    def _ask(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return the driver's answer, None where this GPU or this user has none."""
        try:
            return function(*arguments)
        except (
            self._nvml.NVMLError_NotSupported,
            self._nvml.NVMLError_NoPermission,
            self._nvml.NVMLError_InvalidArgument,
        ):
            return None


def _measure(index: int, name: str, value: float, message: str, *, warn: float, fail: float = 0) -> Measure:
    return Measure(name=f"gpu {index} {name}", kind="gpu", value=value, warn=warn, fail=fail, message=message)


def open_gpus(policy: DetectPolicy) -> Gpus | None:
    """Return this host's GPUs, None without the library or without a driver; a debug line says which."""
    try:
        import pynvml  # optional, and only where this is called
    except ImportError:
        log.debug("GPUs are not watched: pynvml is not installed (pip install 'nvidia-ml-py>=12.535')")
        return None
    try:
        pynvml.nvmlInit()
        return Gpus(pynvml, policy)
    except pynvml.NVMLError as error:
        log.debug("GPUs are not watched: %s", error)
        return None
