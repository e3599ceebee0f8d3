"""Prompts that the target writes: the header they start from, the rules they must pass, files that go on."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from eyas.cli import main
from eyas.errors import InvalidInputError
from eyas.text import TextTokenizer
from eyas.train.prompts import Prompt, read_prompts
from eyas.train.synthesize import Kept, SynthesisSettings, synthesize, user_turn
from support.table_cli import WORDS, load_table, table_tokenizer, use_table

SETTINGS = SynthesisSettings(count=12, max_tokens=30, batch=5, min_characters=4, max_overlap=0.9, seed=1)


def test_a_turn_starts_where_the_template_puts_the_users_words() -> None:
    tokenizer = table_tokenizer()
    assert user_turn(tokenizer)[0] == "begin user "
    opening, closing = user_turn(tokenizer, "w9")
    assert opening == "begin system w9 end user "
    assert closing.startswith(" end")


def test_a_template_that_hides_the_users_words_is_refused() -> None:
    hiding = TextTokenizer(table_tokenizer().backend, "{% for m in messages %}{{ m.content | length }}{% endfor %}")
    with pytest.raises(InvalidInputError, match="prompts of your own"):
        user_turn(hiding)


def test_turns_are_what_the_target_says_after_the_header(tmp_path: Path) -> None:
    loaded, _ = load_table()
    out = tmp_path / "p.jsonl"
    done = synthesize(loaded.target, loaded.tokenizer, out, SETTINGS, system="w9")
    assert done.kept == 12 and done.attempts == 12 + done.dropped.total()
    prompts = read_prompts([out])
    assert len({prompt.turns for prompt in prompts}) == 12
    assert all(prompt.system == "w9" for prompt in prompts)
    marks = {"end", "<eos>"}
    assert not any(marks & set(prompt.turns[0].split()) for prompt in prompts)
    assert all(set(prompt.turns[0].split()) <= set(WORDS) for prompt in prompts)


def test_each_attempt_is_the_same_in_any_batch(tmp_path: Path) -> None:
    loaded, _ = load_table()
    texts = []
    for batch in (1, 7):
        out = tmp_path / f"{batch}.jsonl"
        synthesize(loaded.target, loaded.tokenizer, out, replace(SETTINGS, batch=batch, max_overlap=1.0))
        lines = [json.loads(line) for line in out.read_text().splitlines()]
        texts.append({line["attempt"]: line["turns"][0] for line in lines})
    shared = texts[0].keys() & texts[1].keys()
    assert len(shared) > 6 and all(texts[0][attempt] == texts[1][attempt] for attempt in shared)


def test_a_file_is_continued(tmp_path: Path) -> None:
    loaded, _ = load_table()
    out = tmp_path / "p.jsonl"
    synthesize(loaded.target, loaded.tokenizer, out, replace(SETTINGS, count=5))
    first = read_prompts([out])
    assert len(first) == 5
    done = synthesize(loaded.target, loaded.tokenizer, out, SETTINGS)
    assert done.kept == 12
    prompts = read_prompts([out])
    assert prompts[:5] == first and len({prompt.turns for prompt in prompts}) == 12
    assert synthesize(loaded.target, loaded.tokenizer, out, SETTINGS).attempts == 0
    attempts = [json.loads(line)["attempt"] for line in out.read_text().splitlines()]
    assert len(set(attempts)) == 12
    out.write_text('{"turns": ["mine"]}\n')
    with pytest.raises(InvalidInputError, match="line 1"):
        synthesize(loaded.target, loaded.tokenizer, out, SETTINGS)


def test_attempts_run_out(tmp_path: Path) -> None:
    loaded, _ = load_table()
    settings = replace(SETTINGS, max_attempts=9, min_characters=1000)
    done = synthesize(loaded.target, loaded.tokenizer, tmp_path / "p.jsonl", settings)
    assert done.kept == 0 and done.attempts == 9
    assert set(done.dropped) <= {"short", "unfinished"}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("How do bees find their way home after a long flight?", None),
        ("Hi there", "short"),
        ("=== --- *** !!! ??? ... a", "not text"),
        ("What is caf\ufffd culture like in Vienna?", "not text"),
        ("tell me more tell me more tell me more tell me more tell me more", "repetitive"),
        ("Why is this so loooooooooooooooooooooong?", "repetitive"),
        ("why is the  SKY blue in the daytime?", "duplicate"),
        ("Why is the sky blue in the daytime? Please.", "similar"),
        ("蜜蜂在长途飞行之后怎样找到回家的路", None),
        ("Как пчёлы находят дорогу домой после долгого полёта?", None),
        ("好的好的好的好的好的好的好的好的好的好的", "repetitive"),
    ],
)
def test_rules(text: str, reason: str | None) -> None:
    kept = Kept(SynthesisSettings())
    kept.add("Why is the sky blue in the daytime?")
    assert kept.objection(text) == reason


def test_settings_are_checked() -> None:
    with pytest.raises(InvalidInputError, match="temperature"):
        SynthesisSettings(temperature=0.0)
    with pytest.raises(InvalidInputError, match="count"):
        SynthesisSettings(count=0)


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    use_table(monkeypatch)
    out = tmp_path / "p.jsonl"
    with pytest.raises(SystemExit) as left:
        main(["data", "synthesize", "--out", str(out), "--count", "3", "--max-tokens", "30", "--json"])
    assert left.value.code in (0, None)
    assert json.loads(capsys.readouterr().out)["kept"] == 3
    prompts = read_prompts([out])
    assert [type(prompt) for prompt in prompts] == [Prompt] * 3
