"""How and where a measurement was made: command, machine, versions, commit.

Nothing is imported just to ask for its version.
"""

from __future__ import annotations

import os
import platform
import re
import shlex
import subprocess
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as _version
from pathlib import Path

PACKAGES = ("eyas", "numpy", "torch", "transformers", "tokenizers", "safetensors", "gguf")


def version(package: str) -> str | None:
    """The installed version; None where it is not installed."""
    try:
        return _version(package)
    except PackageNotFoundError:
        return None


def versions() -> dict[str, str | None]:
    """Python and the packages whose arithmetic or files matter here."""
    return {"python": platform.python_version(), **{package: version(package) for package in PACKAGES}}


def machine() -> dict[str, str | int | None]:
    """Processor, cores this process may use, memory in bytes, operating system."""
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": _memory(),
        "system": f"{platform.system()} {platform.release()}",
        "architecture": platform.machine(),
    }


def machine_name(device: str = "cpu") -> str:
    """Processor and number of cores, as far as the system tells: "AMD EPYC 7763 x2"; with an accelerator its name,
    too."""
    name = f"{_cpu_name()} x{os.cpu_count()}"
    if device.startswith("cuda"):
        import torch

        return f"{name}, {torch.cuda.get_device_name(device)}"
    return name if device == "cpu" else f"{name}, {device}"


def command_line(words: Iterable[str]) -> str:
    """A command as others can give it, quoted for a shell."""
    return shlex.join(map(portable, words))


def portable(word: str) -> str:
    """An absolute path, alone or behind an option's "=", by its last part: results are read on other machines."""
    return re.sub(r"(^|=)/(?:[^/]*/)*(?=[^/])", r"\1", word)


def commit() -> str | None:
    """Commit of the source tree that is running, "-dirty" added when it was changed; None outside a checkout."""
    here = Path(__file__).resolve().parent
    if _git(here, "ls-files", "--error-unmatch", "environment.py") is None:
        return None
    head = _git(here, "rev-parse", "HEAD")
    return f"{head}-dirty" if head and _git(here, "status", "--porcelain", "--untracked-files=no") else head


def _git(directory: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(directory), *arguments], capture_output=True, text=True, check=False, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None
