"""Damage model files and read them, for as long as one likes; ``make fuzz``.

    python tests/fuzz_readers.py [--seconds 60] [--seed 0]

With the package atheris installed, coverage guides the damage; without it, chance does. What is found is kept in
fuzz-failures/ and printed with its traceback.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
import traceback
from contextlib import nullcontext
from pathlib import Path

try:
    import atheris
except ImportError:
    atheris = None

with atheris.instrument_imports(include=["eyas"]) if atheris else nullcontext():
    from support.mutants import Subject, mutate, subjects

FAILURES = Path("fuzz-failures")
ADDRESS_SPACE = 2 << 30  # bytes beyond what is in use at the start
LONGEST = 30  # seconds for one file; what takes longer hangs


def main() -> int:
    parser = argparse.ArgumentParser(description="Damage model files and read them.")
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        known = subjects(folder)
        files = [(subject, file) for subject in known for file in subject.files]
        (folder / "open").mkdir()
        _limit_memory()
        if atheris:
            _guided(files, folder, given.seconds, given.seed)
            return 0
        return _blind(files, folder / "open", given.seconds, given.seed)


def _blind(files: list[tuple[Subject, str]], folder: Path, seconds: int, seed: int) -> int:
    rng = random.Random(seed)
    end, tried, refused, failed = time.monotonic() + seconds, 0, 0, 0
    while time.monotonic() < end:
        subject, file = rng.choice(files)
        content = mutate(subject.files[file], rng)
        tried += 1
        try:
            refused += subject.meets(folder, file, content) is not None
        except Exception:
            failed += 1
            _keep(subject, file, content)
    print(f"{tried} damaged files: {refused} refused, {failed} failures, the others loaded")
    return min(failed, 1)


def _guided(files: list[tuple[Subject, str]], folder: Path, seconds: int, seed: int) -> None:
    """The first byte of an input says which file the rest stands for."""
    corpus = folder / "corpus"
    corpus.mkdir()
    for index, (subject, file) in enumerate(files):
        (corpus / str(index)).write_bytes(bytes([index]) + subject.files[file])

    def one(data: bytes) -> None:
        if data:
            subject, file = files[data[0] % len(files)]
            subject.meets(folder / "open", file, data[1:])

    def change(data: bytes, most: int, number: int) -> bytes:
        if number % 2 or not data:
            return atheris.Mutate(data, most)
        return (data[:1] + mutate(data[1:], random.Random(number)))[:most]

    FAILURES.mkdir(exist_ok=True)
    options = [f"-max_total_time={seconds}", f"-seed={seed + 1}", f"-timeout={LONGEST}", "-rss_limit_mb=4096"]
    atheris.Setup(
        [sys.argv[0], *options, f"-artifact_prefix={FAILURES}/", "-max_len=400000", str(corpus)],
        one,
        custom_mutator=change,
    )
    atheris.Fuzz()


def _keep(subject: Subject, file: str, content: bytes) -> None:
    FAILURES.mkdir(exist_ok=True)
    path = FAILURES / f"{subject.name}-{abs(hash(content)):016x}-{file}"
    path.write_bytes(content)
    print(f"{path}:\n{traceback.format_exc()}", file=sys.stderr)


def _limit_memory() -> None:
    try:
        import resource

        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except (ImportError, OSError):
        return
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + ADDRESS_SPACE, most))


if __name__ == "__main__":
    sys.exit(main())
