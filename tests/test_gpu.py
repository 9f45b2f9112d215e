"""GPU health through NVML: the real library where there is no driver, and a driver of our own behind its functions.

No GPU is needed: `Driver` replaces the functions that reach the driver; constants and errors are the library's.
"""

import logging
import sys
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from resilient_run.daemon.base.policy import DetectPolicy
from resilient_run.daemon.health.gpu import Gpus, open_gpus
from resilient_run.daemon.health.threshold import Judge

pynvml = pytest.importorskip("pynvml", reason="needs the extra nvml")


class Driver:
    """Two healthy GPUs, until a test says otherwise."""

    def __init__(self) -> None:
        self.events: deque[tuple[int, int]] = deque()
        self.registered: list[str] = []
        self.celsius = {"a": 50, "b": 60}
        self.ecc: dict[str, Any] = {"a": 3, "b": pynvml.NVMLError_NotSupported()}
        self.link_errors = {"a": 7, "b": 0}
        self.rows: dict[str, Any] = {"a": (0, 0, 0, 0), "b": pynvml.NVMLError_NotSupported()}
        self.pending_pages = {"a": 0, "b": 0}
        self.lost: dict[str, Exception] = {}
        self.open = True

    def __getattr__(self, name: str) -> Any:
        value = getattr(pynvml, name)
        assert not name.startswith("nvmlDevice"), f"{name} would reach the driver"
        return value

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        return "ab"[index]

    def nvmlDeviceGetIndex(self, device: str) -> int:
        return "ab".index(device)

    def nvmlEventSetCreate(self) -> list[Any]:
        return []

    def nvmlDeviceRegisterEvents(self, device: str, types: int, events: Any) -> None:
        assert types == pynvml.nvmlEventTypeXidCriticalError
        self.registered.append(device)

    def nvmlEventSetWait_v2(self, events: Any, timeout_ms: int) -> Any:
        if not self.events:
            raise pynvml.NVMLError_Timeout()
        index, xid = self.events.popleft()
        kind = pynvml.nvmlEventTypeXidCriticalError
        return SimpleNamespace(device="ab"[index], eventType=kind, eventData=xid)

    def nvmlEventSetFree(self, events: Any) -> None:
        assert self.open

    def nvmlShutdown(self) -> None:
        self.open = False

    def nvmlDeviceGetTemperature(self, device: str, sensor: int) -> int:
        if device in self.lost:
            raise self.lost[device]
        return self.celsius[device]

    def nvmlDeviceGetTotalEccErrors(self, device: str, kind: int, counter: int) -> int:
        assert (kind, counter) == (pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC)
        return answer(self.ecc[device])

    def nvmlDeviceGetNvLinkState(self, device: str, link: int) -> int:
        if link >= 2:
            raise pynvml.NVMLError_InvalidArgument()
        return int(link == 0)

    def nvmlDeviceGetNvLinkErrorCounter(self, device: str, link: int, counter: int) -> int:
        assert link == 0, "an inactive link has no counters"
        return self.link_errors[device] if counter == pynvml.NVML_NVLINK_ERROR_DL_CRC_DATA else 0

    def nvmlDeviceGetRemappedRows(self, device: str) -> tuple[int, int, int, int]:
        return answer(self.rows[device])

    def nvmlDeviceGetRetiredPagesPendingStatus(self, device: str) -> int:
        return self.pending_pages[device]


def answer(value: Any) -> Any:
    if isinstance(value, Exception):
        raise value
    return value


def found(gpus: Gpus) -> dict[str, tuple[str, str]]:
    """Return name → severity and message."""
    return {name: (seen.severity, seen.message) for name, seen in Judge().judge(gpus.measure()).items()}


@pytest.fixture
def driver() -> Driver:
    return Driver()


def test_healthy_gpus_are_not_worth_a_word(driver: Driver) -> None:
    """What had gone wrong before the job began does not count."""
    gpus = Gpus(driver, DetectPolicy())
    assert driver.registered == ["a", "b"]
    assert found(gpus) == {}
    gpus.close()
    assert not driver.open


def test_critical_xids_fail_the_host_and_stay(driver: Driver) -> None:
    gpus = Gpus(driver, DetectPolicy())
    driver.events.extend([(1, 79), (0, 13), (0, 31), (1, 79)])
    assert found(gpus) == {"gpu 1 xid 79": ("fail", "GPU 1 had XID 79, 2 time(s) (the limit is 1)")}
    assert found(gpus).keys() == {"gpu 1 xid 79"}


@pytest.mark.parametrize(
    ("change", "name", "severity"),
    [
        (lambda driver: driver.ecc.update(a=4), "gpu 0 ecc", "fail"),
        (lambda driver: driver.link_errors.update(b=100), "gpu 1 nvlink", "warn"),
        (lambda driver: driver.celsius.update(b=95), "gpu 1 temperature", "warn"),
        (lambda driver: driver.rows.update(a=(0, 1, 1, 0)), "gpu 0 pending", "warn"),
        (lambda driver: driver.rows.update(a=(0, 9, 0, 1)), "gpu 0 remapping", "fail"),
        (lambda driver: driver.pending_pages.update(b=1), "gpu 1 pending", "warn"),
        (lambda driver: driver.lost.update(b=pynvml.NVMLError_GpuIsLost()), "gpu 1 lost", "fail"),
        (lambda driver: driver.lost.update(b=pynvml.NVMLError_Unknown()), "gpu 1 unknown", "warn"),
    ],
)
def test_each_defect_is_told_apart(driver: Driver, change: Any, name: str, severity: str) -> None:
    gpus = Gpus(driver, DetectPolicy())
    change(driver)
    assert {key: value[0] for key, value in found(gpus).items()} == {name: severity}


def test_broken_gpu_may_be_a_mere_warning(driver: Driver) -> None:
    gpus = Gpus(driver, DetectPolicy(gpu_broken="warn"))
    driver.events.append((0, 48))
    assert found(gpus)["gpu 0 xid 48"][0] == "warn"


def test_driver_that_gives_no_events_is_asked_for_the_rest(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Driver, "nvmlEventSetCreate", lambda self: answer(pynvml.NVMLError_NotSupported()))
    gpus = Gpus(driver, DetectPolicy())
    driver.celsius["a"] = 99
    assert found(gpus).keys() == {"gpu 0 temperature"}
    gpus.close()


def test_without_a_driver_one_debug_line_says_so(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_driver() -> None:
        raise pynvml.NVMLError_LibraryNotFound()

    monkeypatch.setattr(pynvml, "nvmlInit", no_driver)
    with caplog.at_level(logging.DEBUG):
        assert open_gpus(DetectPolicy()) is None
    (record,) = caplog.records
    assert (record.levelname, record.message) == ("DEBUG", "GPUs are not watched: NVML Shared Library Not Found")


def test_without_the_library_one_debug_line_says_so(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with caplog.at_level(logging.DEBUG):
        assert open_gpus(DetectPolicy()) is None
    assert "pip install 'nvidia-ml-py>=12.535'" in caplog.messages[0]
