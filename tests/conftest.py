"""Settings every test shares."""

from __future__ import annotations

import importlib.util
import os
import sys

import pytest
from hypothesis import settings

# The same examples in every run, and no clock: a busy machine fails no test.
settings.register_profile("eyas", deadline=None, derandomize=True)
settings.load_profile("eyas")

if core := os.environ.get("EYAS_CORE"):  # another build of the native engine, see .ci/sanitize
    spec = importlib.util.spec_from_file_location("eyas.native._core", core)
    assert spec is not None and spec.loader is not None
    sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[spec.name])


@pytest.fixture(autouse=True)
def _no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which tree suits a machine is not to depend on how busy the one that tests is."""
    from eyas.costs import typical_costs

    monkeypatch.setattr("eyas.forecast.measure_costs", lambda *drafting, **options: typical_costs(0.03))
    monkeypatch.setattr("eyas.forecast.Load.others_since", lambda self, start: 0.0)
