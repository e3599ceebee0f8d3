"""A whole model made of a table: target, drafter and tokenizer, loaded in place of a real one."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from eyas.text import TextTokenizer
from support.drafters import ScriptedDrafter, mixed
from support.tiny import TableTarget

VOCAB = 48
TEMPLATE = "begin {% for m in messages %}{{ m.role }} {{ m.content }} end {% endfor %}assistant"
WORDS = ["begin", "user", "assistant", "system", "end", "<eos>", "\n", "안녕"]
WORDS += [f"w{i}" for i in range(len(WORDS), VOCAB)]
EOS = WORDS.index("<eos>")


def table_tokenizer() -> TextTokenizer:
    """Every word a token; unknown words become w47."""
    backend = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token=WORDS[-1]))
    backend.pre_tokenizer = WhitespaceSplit()
    return TextTokenizer(backend, TEMPLATE)


def save_table_tokenizer(model: Path) -> None:
    """Put it beside the weights in the directory ``model``."""
    table_tokenizer().backend.save(str(model / "tokenizer.json"))
    (model / "chat_template.jinja").write_text(TEMPLATE)


@dataclass(frozen=True)
class TableSource:
    """Where a table comes from."""

    name: str = "table"

    def fingerprint(self) -> str:
        return "7ab1e"


@dataclass(frozen=True)
class TableLoaded:
    """What ``load_target`` would return."""

    target: TableTarget
    tokenizer: TextTokenizer
    source: TableSource = field(default_factory=TableSource)


def load_table(
    *, max_positions: int = 512, eos: bool = True, memory: int | None = 3
) -> tuple[TableLoaded, ScriptedDrafter]:
    """A target that depends on its last ``memory`` tokens, and a drafter right in first, second or third place."""
    target = TableTarget(VOCAB, seed=3, max_positions=max_positions, memory=memory, eos_token_ids=(EOS,) if eos else ())
    drafter = ScriptedDrafter(target.ranking, mixed(0, 1, 0, 2), first_token=WORDS.index("begin"))
    return TableLoaded(target, table_tokenizer()), drafter


def use_table(monkeypatch: pytest.MonkeyPatch, **settings: object) -> tuple[TableLoaded, ScriptedDrafter]:
    """Make the command line load the table, whatever model it is asked for."""
    loaded, drafter = load_table(**settings)  # type: ignore[arg-type]
    monkeypatch.setattr("eyas.loading.load_target", lambda name, **_: loaded)
    monkeypatch.setattr("eyas.loading.feature_levels", lambda name: 1)
    monkeypatch.setattr("eyas.loading.load_drafter", lambda name, _: None if name == "none" else drafter)
    monkeypatch.setattr("eyas.loading.head_notice", lambda name, _: None)  # a table has no head to speak of
    return loaded, drafter
