"""Profiles on disk: where they lie, how they are written, and which of them is valid here."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from eyas.errors import CheckpointError, EyasError, InvalidInputError
from eyas.fetch import cache_directory
from eyas.files import replace_file
from eyas.profile import Profile, ProfileKey
from eyas.profile_policies import check_policies


def profiles_directory() -> Path:
    """Where all profiles are kept."""
    return cache_directory() / "profiles"


def profile_path(key: ProfileKey) -> Path:
    """Where the profile for ``key`` is kept. Machine, threads and the drafter's weights are not in the name: one file
    per choice of model, engine, dtype, drafter and way of answering, replaced by every re-tuning."""
    place = sha256(key.drafter.encode()).hexdigest()[:8]  # heads of one name in several directories
    words = (key.model, key.engine, key.dtype, f"{Path(key.drafter).name[:40]}.{place}")
    name = "-".join(re.sub(r"[^\w.+]+", "_", word).strip("_.") for word in words)
    return profiles_directory() / f"{name}-{'sampled' if key.sampled else 'greedy'}.json"


def save_profile(profile: Profile, path: Path | None = None) -> Path:
    """Write a profile whole or not at all.

    Raises:
        InvalidInputError: a place that cannot be written.
    """
    path = path or profile_path(profile.key)
    keep(path, profile.as_dict())
    return path


def keep(path: Path, values: Mapping[str, Any]) -> None:
    """Write plain JSON values into the cache.

    Raises:
        InvalidInputError: a place that cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, [json.dumps(values, indent=1, allow_nan=False).encode()])
    except OSError as error:
        raise InvalidInputError(f"cannot write {path}: {error}; EYAS_CACHE chooses another place") from None


def read_profile(path: Path) -> Profile:
    """Read a profile, whatever it is valid for.

    Raises:
        CheckpointError: nothing there, or no profile.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"cannot read the profile {path}: {error}") from None
    if not isinstance(values, dict):
        raise CheckpointError(f"the profile {path} is damaged: not a JSON object; run eyas tune again")
    try:
        profile = Profile.from_dict(values)
        check_policies(profile)
    except EyasError as error:
        raise CheckpointError(f"the profile {path} is damaged: {error}; run eyas tune again") from None
    return profile


def load_profile(
    key: ProfileKey, path: Path | None = None, notice: Callable[[str], object] | None = None
) -> Profile | None:
    """The profile for ``key``, or None with a ``notice`` where there is one that does not fit.

    Args:
        key: what it must be valid for.
        path: a certain file; where None, the place ``save_profile`` uses, and nothing there is no news.
        notice: told in one line why a profile is not used.

    Raises:
        CheckpointError: a named file that is missing or damaged. (A damaged one at the usual place is only noticed.)
    """
    usual = path is None
    place = path or profile_path(key)
    if usual and not place.exists():
        return None
    try:
        profile = read_profile(place)
    except CheckpointError as error:
        if not usual:
            raise
        if notice:
            notice(str(error))
        return None
    if different := profile.key.differences(key):
        if notice:
            notice(f"the profile {place} is not used: it was made for {'; '.join(different)}; run {key.command} again")
        return None
    return profile
