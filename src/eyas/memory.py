"""Memory there is, and a refusal before loading what does not fit into it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from eyas.errors import NotEnoughMemoryError


def resident_bytes() -> int | None:
    """Memory of this process that is in RAM, mapped files included; None where the system does not say."""
    status = _fields(Path("/proc/self/status"))
    return status.get("VmRSS")


def available_bytes(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes that this process can still take; None where the system does not say.

    The least of what the system could hand out without swapping, what each control group that the process is in leaves
    (its file cache counts as free: it is given up on demand), and what the address-space limit leaves.

    Args:
        proc, groups: where the kernel's files are; other places are for tests.
    """
    limits = [_fields(proc / "meminfo").get("MemAvailable"), *_group_limits(proc, groups), _address_space(proc)]
    known = [limit for limit in limits if limit is not None]
    return max(0, min(known)) if known else None


def require_memory(name: str, parts: Mapping[str, int], available: int | None, advice: str = "") -> None:
    """Let pass what fits.

    Args:
        name: what is to be loaded, for the message.
        parts: bytes by purpose, e.g. {"weights": 10}.
        available: bytes there are; None lets everything pass.
        advice: what would work, appended to the message.

    Raises:
        NotEnoughMemoryError: with all the numbers.
    """
    needed = sum(parts.values())
    if available is None or needed <= available:
        return
    listed = ", ".join(f"{part} {human(size)}" for part, size in parts.items())
    raise NotEnoughMemoryError(
        f"{name}: needs about {human(needed)} of memory ({listed}), {human(available)} are available"
        + (f"; {advice}" if advice else "")
    )


def human(size: int) -> str:
    """A number of bytes for people."""
    return f"{size / (1 << 30):.2f} GiB" if size >= 1 << 30 else f"{size / (1 << 20):.1f} MiB"


def _group_limits(proc: Path, groups: Path) -> Iterator[int]:
    """What the control groups leave, version 2 and 1, from the process's own group up to the root. A container
    usually sees its own group as the root."""
    for line in _text(proc / "self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            root, most, used, prefix = groups, "memory.max", "memory.current", ""
        elif "memory" in controllers.split(","):
            root, most, used, prefix = groups / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"
        else:
            continue
        inner = root / path.strip("/")
        for group in (inner, *inner.parents):
            limit, usage = _text(group / most).strip(), _text(group / used).strip()
            if limit.isdecimal() and usage.isdecimal():
                stat = _fields(group / "memory.stat")
                cached = stat.get(prefix + "inactive_file", 0) + stat.get(prefix + "active_file", 0)
                yield int(limit) - int(usage) + cached
            if group == root:
                break


def _address_space(proc: Path) -> int | None:
    """What ``ulimit -v`` leaves."""
    for line in _text(proc / "self/limits").splitlines():
        if line.startswith("Max address space"):
            soft = line.split()[3]
            taken = _fields(proc / "self/status").get("VmSize")
            return int(soft) - taken if soft.isdecimal() and taken is not None else None
    return None


def _fields(path: Path) -> dict[str, int]:
    """Lines like ``Name: 12 kB`` or ``name 12`` as bytes; whatever is no number is left out."""
    values = {}
    for line in _text(path).splitlines():
        words = line.replace(":", " ").split()
        if len(words) in (2, 3) and words[1].isdecimal():
            values[words[0]] = int(words[1]) * (1024 if words[-1] == "kB" else 1)
    return values


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""
