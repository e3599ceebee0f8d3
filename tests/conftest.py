"""Settings every test shares."""

from __future__ import annotations

from hypothesis import settings

# The same examples in every run, and no clock: a busy machine fails no test.
settings.register_profile("eyas", deadline=None, derandomize=True)
settings.load_profile("eyas")
