"""The CPU engine: packed weights, batch-invariant kernels, a whole decoder pass in one native call.

The compiled part is optional. ``available()`` tells whether it can be used here, ``reason()`` why not.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from typing import Any

from eyas.errors import EyasError

_core: Any = None
_reason = ""
try:
    _core = importlib.import_module("eyas.native._core")
except ImportError as error:
    _reason = f"the compiled extension eyas.native._core cannot be imported ({error}); install with a C++20 compiler"


def available() -> bool:
    """Whether the native engine can run here."""
    return _core is not None


def reason() -> str:
    """Why the native engine cannot run here; empty when it can."""
    return _reason


def core() -> Any:
    """The compiled module; call only where ``available()``."""
    return _core


def supports(config: Mapping[str, Any], dtype: str = "auto") -> bool:
    """Whether the engine runs a model with this config at this weight type."""
    from eyas.native.config import core_config, weight_type

    try:
        weight_type(dtype)
        core_config(config)
    except (EyasError, KeyError):
        return False
    return True


def kernel_sets() -> list[str]:
    """Kernel sets that this build has and this processor can run, best first."""
    return list(_core.kernel_sets()) if _core is not None else []


def default_threads() -> int:
    """Processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
