"""The one door to onnxruntime, which would report to its vendor."""

from __future__ import annotations

import os
from types import ModuleType


def load_onnxruntime() -> ModuleType:
    """Import onnxruntime with its telemetry switched off.

    Its builds since 1.31 keep a device id in the user's cache folder and send events unless this variable is set before
    the import; its function that disables events comes too late for the device id. It helps where a program has already
    imported onnxruntime.
    """
    os.environ["ORT_DISABLE_TELEMETRY"] = "1"
    import onnxruntime

    onnxruntime.disable_telemetry_events()
    return onnxruntime  # type: ignore[no-any-return]
