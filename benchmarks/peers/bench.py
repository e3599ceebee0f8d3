"""A run: environments, models, a trial of settings, the race, and the results as plain JSON values."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eyas.models import ModelSource
from peers.environments import Environments, make_all
from peers.lineup import Contestant, Settings
from peers.models import ModelError, Models
from peers.protocol import ProtocolError
from peers.race import Prompt, Row, Rules, race, warm_up
from peers.summary import collect, rate
from peers.worker import Worker

LOAD_TIMEOUT = 1200.0
"""Seconds: vLLM compiles the model and Eyas may tune itself while loading."""

WARM_UP_TOKENS = 32
MIN_FREE_BYTES = 2 << 30
"""A worker is started only where so much memory is left: swapping would spoil every measurement."""


@dataclass
class Bench:
    """A comparison under way.

    Attributes:
        source: the model.
        lineup: who is compared.
        environments, models: where engines and forms of the model are.
        threads: of each engine.
        prompts: what is measured.
        trial_prompts: what settings are tried on; none: everyone takes its first ones.
        warm_up_prompt: asked first of everybody, not counted.
        tune_prompts: given to Eyas to tune itself on.
        rules: how everything is asked.
        positions: longest prompt and its answer together.
        tell: shown to the user, a line at a time.
        missing: contestant -> why it was not measured.
        trials: contestant -> settings tried and their tokens/s or error.
        chosen: contestant -> settings.
        facts: contestant -> what its worker says of itself.
    """

    source: ModelSource
    lineup: Sequence[Contestant]
    environments: Environments
    models: Models
    threads: int
    prompts: Sequence[Prompt]
    trial_prompts: Sequence[Prompt]
    warm_up_prompt: Prompt
    tune_prompts: Sequence[Prompt]
    rules: Rules
    positions: int
    tell: Callable[[str], object]
    missing: dict[str, str] = field(default_factory=dict)
    trials: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    chosen: dict[str, dict[str, Any]] = field(default_factory=dict)
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)

    def setup(self) -> None:
        """Make what is not there: environments and forms of the model. What fails is noted in ``missing``."""
        needed = {one.engine for one in self._present() if one.peer}
        failures = make_all(self.environments, needed, self.tell)
        for one in self.lineup:
            if one.excuse:
                self.missing[one.name] = one.excuse
            elif one.engine in failures:
                self.missing[one.name] = failures[one.engine]
        for form in dict.fromkeys(one.model for one in self._present() if one.model):
            self.tell(f"model {form}")
            try:
                self.models.path(form)
            except ModelError as error:
                for one in self._present():
                    if one.model == form:
                        self.missing[one.name] = f"no model {form}: {error}"
                self.tell(f"model {form}: {error}")

    def choose(self, known: Mapping[str, Settings]) -> None:
        """Find everyone's best settings; those in ``known`` are taken as they are."""
        for one in self._present():
            if one.name in known:
                self.chosen[one.name] = dict(known[one.name])
            elif not self.trial_prompts or len(one.variants) == 1:
                self.chosen[one.name] = dict(one.variants[0])
            else:
                self._try_variants(one)

    def _try_variants(self, one: Contestant) -> None:
        self.tell(f"trial of {one.name}: {len(one.variants)} settings")
        errors: dict[str, str] = {}
        variants = {str(number): variant for number, variant in enumerate(one.variants)}
        with ExitStack() as stack:
            workers = self._start(stack, {key: (one, variant) for key, variant in variants.items()}, errors)
            rows = self._ask(workers, self.trial_prompts, Rules(self.rules.tokens, self.rules.stop), errors)
        answers = collect([row for row in rows if row["contestant"] not in errors])
        rates = {key: rate(answers[key]) for key in answers}
        self.trials[one.name] = [
            {"settings": variant, "tokens_per_second": rates.get(key), "error": errors.get(key)}
            for key, variant in variants.items()
        ]
        if rates:
            self.chosen[one.name] = dict(variants[max(rates, key=rates.__getitem__)])
        else:
            self.missing[one.name] = next(iter(errors.values()))
        for key, variant in variants.items():
            self.tell(f"  {f'{rates[key]:.1f} tokens/s' if key in rates else errors.get(key)}  {dict(variant)}")

    def run(self, progress: Callable[[list[Row]], object]) -> list[Row]:
        """The race itself."""
        with ExitStack() as stack:
            wanted = {one.name: (one, self.chosen[one.name]) for one in self._present()}
            workers = self._start(stack, wanted, self.missing)
            self.facts = {name: worker.facts for name, worker in workers.items()}
            return self._ask(workers, self.prompts, self.rules, self.missing, progress)

    def _present(self) -> list[Contestant]:
        return [one for one in self.lineup if one.name not in self.missing and not one.excuse]

    def _start(
        self, stack: ExitStack, wanted: Mapping[str, tuple[Contestant, Settings]], errors: dict[str, str]
    ) -> dict[str, Worker]:
        """Workers that loaded, by key; the others' reasons go to ``errors``."""
        workers: dict[str, Worker] = {}
        for key, (one, settings) in wanted.items():
            if (free := free_memory()) is not None and free < MIN_FREE_BYTES:
                errors[key] = f"only {free / 2**30:.1f} GiB of memory are left; compare fewer at a time (--only)"
                self.tell(f"{key}: {errors[key]}")
                continue
            self.tell(f"loading {one.name}")
            try:
                log = self.environments.root / "logs" / f"{one.name}-{key}.log".replace(" ", "-")
                log.parent.mkdir(parents=True, exist_ok=True)
                worker = stack.enter_context(
                    Worker(self._command(one), self._settings(one, settings), self._variables(one), log)
                )
                worker.wait_ready(LOAD_TIMEOUT)
            except (ProtocolError, OSError) as error:
                errors[key] = str(error)
                self.tell(f"{one.name}: {error}")
            else:
                workers[key] = worker
        return workers

    def _ask(
        self,
        workers: dict[str, Worker],
        prompts: Sequence[Prompt],
        rules: Rules,
        errors: dict[str, str],
        progress: Callable[[list[Row]], object] = lambda rows: None,
    ) -> list[Row]:
        def failed(name: str, reason: str) -> None:
            errors[name] = reason
            self.tell(f"{name}: {reason}")

        warm_up(workers, self.warm_up_prompt, min(WARM_UP_TOKENS, rules.tokens), failed)
        running = {name: worker for name, worker in workers.items() if name not in errors}
        return race(running, prompts, rules, failed, progress)

    def _command(self, one: Contestant) -> list[str]:
        python = str(self.environments.python(one.engine)) if one.peer else sys.executable
        return [python, "-m", "peers.serve", one.engine]

    def _settings(self, one: Contestant, settings: Settings) -> dict[str, Any]:
        common: dict[str, Any] = {
            "threads": self.threads,
            "positions": self.positions,
            "model": str(self.models.path(one.model)) if one.model else self.source.name,
        }
        if settings.get("policy") == "budgeted":
            common["tune_prompts"] = [prompt.token_ids for prompt in self.tune_prompts]
        return {**settings, **common}

    def _variables(self, one: Contestant) -> dict[str, str]:
        here = str(Path(__file__).resolve().parent.parent)
        inherited = [] if one.peer else [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
        preload = self.environments.preload(one.engine)
        return {
            **os.environ,
            **({"LD_PRELOAD": preload} if preload else {}),
            "PYTHONPATH": os.pathsep.join([here, *inherited]),
            "OMP_NUM_THREADS": str(self.threads),
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }


def free_memory() -> int | None:
    """Bytes that can be had without swapping; None where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    found: Iterable[str] = (line for line in lines if line.startswith("MemAvailable:"))
    return next((int(line.split()[1]) * 1024 for line in found), None)
