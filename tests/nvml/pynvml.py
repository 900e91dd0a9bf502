"""An NVML without a driver, for this process and for those that tests start: cards and slices as a file says.

``FAKE_NVML`` names the file, which is read at each call: a test changes it while processes run (:mod:`tests.nvml.box`).
"""

import json
import os
from types import SimpleNamespace

NVML_ERROR_NOT_SUPPORTED, NVML_ERROR_NO_PERMISSION, NVML_ERROR_NOT_FOUND = 3, 4, 6
NVML_ERROR_DRIVER_NOT_LOADED, NVML_ERROR_TIMEOUT, NVML_ERROR_GPU_IS_LOST = 9, 10, 15
NVML_DEVICE_MIG_ENABLE = 1
NVML_TEMPERATURE_GPU = 0
NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC = 1, 0
nvmlEventTypeXidCriticalError = 8
_WORDS = {3: "Not Supported", 4: "Insufficient Permissions", 6: "Not Found", 9: "Driver Not Loaded", 10: "Timeout"}
_WORDS[NVML_ERROR_GPU_IS_LOST] = "GPU is lost"


class NVMLError(Exception):
    def __init__(self, value):
        super().__init__(_WORDS[value])
        self.value = value


def _cards():
    with open(os.environ["FAKE_NVML"], encoding="utf-8") as file:
        return json.load(file)["cards"]


def _told(row, name, error=NVML_ERROR_NOT_SUPPORTED):
    if row.get(name) is None:
        raise NVMLError(error)
    return row[name]


def _row(handle):
    """A handle is a UUID."""
    for card in _cards():
        for row in (card, *(card.get("slices") or ())):
            if row["uuid"] == handle and not card.get("is_lost"):
                return row
    raise NVMLError(NVML_ERROR_GPU_IS_LOST)


def nvmlInit():
    if not os.path.exists(os.environ.get("FAKE_NVML", "")):
        raise NVMLError(NVML_ERROR_DRIVER_NOT_LOADED)


def nvmlShutdown():
    pass


def nvmlDeviceGetCount():
    return len(_cards())


def nvmlDeviceGetHandleByIndex(number):
    card = _cards()[number]
    if card.get("is_lost"):
        raise NVMLError(NVML_ERROR_GPU_IS_LOST)
    return card["uuid"]


def nvmlDeviceGetHandleByUUID(uuid):
    return _row(uuid)["uuid"]


def nvmlDeviceGetUUID(handle):
    return handle


def nvmlDeviceGetName(handle):
    return _row(handle)["name"].encode()


def nvmlDeviceGetMigMode(handle):
    card = _row(handle)
    if card.get("has_no_rights"):
        raise NVMLError(NVML_ERROR_NO_PERMISSION)
    if card.get("is_old"):
        raise NVMLError(NVML_ERROR_NOT_SUPPORTED)
    return [int(card.get("slices") is not None), 0]


def nvmlDeviceGetMaxMigDeviceCount(handle):
    return 7


def nvmlDeviceGetMigDeviceHandleByIndex(handle, index):
    slices = _row(handle)["slices"]
    if index >= len(slices):
        raise NVMLError(NVML_ERROR_NOT_FOUND)
    if slices[index].get("has_no_rights"):
        raise NVMLError(NVML_ERROR_NO_PERMISSION)
    return slices[index]["uuid"]


def nvmlDeviceGetGpuInstanceId(handle):
    return _row(handle)["instance"]


def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle):
    for card in _cards():
        if any(row["uuid"] == handle for row in card.get("slices") or ()):
            return card["uuid"]
    raise NVMLError(NVML_ERROR_NOT_SUPPORTED)


def nvmlDeviceGetMemoryInfo(handle):
    row = _row(handle)
    return SimpleNamespace(used=row.get("used", 0), total=_told(row, "memory"))


def nvmlDeviceGetUtilizationRates(handle):
    return SimpleNamespace(gpu=_told(_row(handle), "utilisation"))


def nvmlDeviceGetPowerUsage(handle):
    return _told(_row(handle), "power_mw")


def nvmlDeviceGetTemperature(handle, kind):
    return _told(_row(handle), "temperature_c")


def nvmlDeviceGetTotalEccErrors(handle, kind, since):
    return _told(_row(handle), "ecc_errors")


def nvmlDeviceGetRemappedRows(handle):
    return (0, 0, 0, _told(_row(handle), "remap_failed"))


def nvmlEventSetCreate():
    return {}


def nvmlDeviceRegisterEvents(handle, kinds, events):
    assert kinds == nvmlEventTypeXidCriticalError
    events[handle] = len(_row(handle).get("xids", ()))  # those from before are not told


def nvmlEventSetWait_v2(events, timeout_ms):
    for handle, num_told in events.items():
        xids = next((card.get("xids", []) for card in _cards() if card["uuid"] == handle), [])
        if len(xids) > num_told:
            xid, instance = xids[num_told]
            events[handle] += 1
            number = 0xFFFFFFFF if instance is None else instance
            return SimpleNamespace(device=handle, eventData=xid, gpuInstanceId=number)
    raise NVMLError(NVML_ERROR_TIMEOUT)


def nvmlEventSetFree(events):
    events.clear()
