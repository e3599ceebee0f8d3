"""The CPU engine: packed weights, batch-invariant kernels, a whole decoder pass in one native call.

The compiled part, ``core``, is optional: it is there only where ``available()``; ``reason()`` tells why not.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from eyas.errors import EyasError

__all__ = ["available", "core", "default_threads", "kernel_sets", "reason", "supports"]

_reason = ""
try:
    import eyas.native._core as core
except ImportError as error:
    _reason = f"the compiled extension eyas.native._core cannot be imported ({error}); install with a C++20 compiler"


def available() -> bool:
    """Whether the native engine can run here."""
    return not _reason


def reason() -> str:
    """Why the native engine cannot run here; empty when it can."""
    return _reason


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
    return core.kernel_sets() if available() else []


def default_threads() -> int:
    """Processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
