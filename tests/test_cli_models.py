"""The command line on models made of weights: a tiny Llama in files, from answering prompts to its own trained head."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest

from eyas import native
from eyas.cli import main
from eyas.models import load_source
from support.table_cli import VOCAB, save_table_tokenizer
from support.tiny import tiny_llama

FAST = ("--max-tokens", "24", "--ignore-eos")
ENGINES = [
    "transformers",
    pytest.param("native", marks=pytest.mark.skipif(not native.available(), reason=native.reason())),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face directory."""
    path = tmp_path_factory.mktemp("model")
    tiny_llama(vocab_size=VOCAB, hidden_size=64, max_positions=256).save_pretrained(path)
    save_table_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text("".join(json.dumps({"turns": [f"w{9 + i} w{10 + i}"]}) + "\n" for i in range(24)))
    return path


@pytest.fixture(scope="module")
def head(model: Path, prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A head trained for it by the commands a user would type."""
    folder = tmp_path_factory.mktemp("train")
    store, run = folder / "store", folder / "run"
    answer = ("data", "answer", str(prompts), "--out", str(store), "--max-tokens", "24", "--batch", "8")
    assert code(*answer, "--target", str(model), "--engine", "transformers", "--dtype", "float32") == 0
    train = ("train", str(store), "--out", str(run), "--target", str(model), "--threads", "1")
    assert code(*train, "--steps", "6", "--rows", "2", "--row-size", "64", "--evaluate-every", "3") == 0
    return run / "head"


def code(*arguments: str) -> int:
    with pytest.raises(SystemExit) as left:
        main(list(arguments))
    return int(left.value.code or 0)


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    capsys.readouterr()
    assert code(*arguments) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_trained_head_drafts_and_changes_nothing(
    capsys: pytest.CaptureFixture[str], model: Path, head: Path, engine: str
) -> None:
    result = run_json(
        capsys,
        *("generate", "w9 w10", "--target", str(model), "--draft", str(head), "--engine", engine),
        *("--dtype", "float32", "--threads", "1", "--json", "--compare", *FAST),
    )
    assert result["identical"] is True
    assert len(result["token_ids"]) == 24
    assert result["stats"]["draft_tokens"] > 0
    assert result["stats"]["cycles"] <= result["baseline"]["stats"]["cycles"]


@pytest.mark.parametrize("engine", ENGINES)
def test_without_a_word_about_drafting_n_grams_serve_any_model(
    capsys: pytest.CaptureFixture[str], model: Path, engine: str
) -> None:
    common = ("--target", str(model), "--engine", engine, "--dtype", "float32", "--threads", "1")
    ask = ("generate", "w9 w10 w9 w10 w9", "--json", "--compare", *FAST, *common)
    capsys.readouterr()
    assert code(*ask) == 0
    captured = capsys.readouterr()
    result = json.loads(captured.out)
    assert captured.err == (
        f"eyas: no draft head is shipped for {model}: what the text repeats drafts (--draft ngram)\n"
    )
    assert result["identical"] is True
    assert result["stats"]["draft_tokens"] > 0
    assert result["token_ids"] == run_json(capsys, *ask, "--draft", "ngram")["token_ids"]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_tuned_head_changes_nothing_and_is_known_by_its_weights(
    capsys: pytest.CaptureFixture[str],
    model: Path,
    head: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    engine: str,
) -> None:
    monkeypatch.setenv("EYAS_CACHE", str(tmp_path / "cache"))
    mine = Path(copytree(head, tmp_path / "head"))
    common = ("--target", str(model), "--engine", engine, "--dtype", "float32", "--threads", "1", "--draft", str(mine))
    budget = ("--num-steps", "3", "--topk", "3", "--num-draft-tokens", "7", "--effort", "quick", "--limit", "2")
    tuned = run_json(capsys, "tune", *common, *budget, "--json")
    assert tuned["key"]["engine"] == engine
    assert tuned["key"]["drafter"] == str(mine.resolve())
    assert {check["policy"] for check in tuned["checks"]} >= {"none", "budgeted", "budgeted+graft"}
    ask = ("generate", "w9 w10", "--json", "--compare", *FAST, *common)
    for policy in ("auto", "sequoia", "budgeted"):
        for graft in ("--graft", "--no-graft"):
            assert run_json(capsys, *ask, "--policy", policy, graft)["identical"] is True
    assert code(*ask, "--dtype", "bfloat16", "--policy", "budgeted") == 2  # tuned for another type
    assert "eyas tune" in capsys.readouterr().err

    weights = mine / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-3] ^= 1
    weights.write_bytes(content)
    capsys.readouterr()
    assert code(*ask) == 0
    assert "drafter fingerprint" in capsys.readouterr().err


def save_bin(model: Any, path: Path) -> None:
    import torch

    model.config.save_pretrained(path)
    torch.save(model.state_dict(), path / "pytorch_model.bin")


LAYOUTS: dict[str, tuple[bool, int, Callable[[Any, Path], None]]] = {  # tied, files of weights, how it is saved
    "single tied": (True, 1, lambda model, path: model.save_pretrained(path)),
    "single untied": (False, 1, lambda model, path: model.save_pretrained(path)),
    "shards tied": (True, 2, lambda model, path: model.save_pretrained(path, max_shard_size="100KB")),
    "bin tied": (True, 1, save_bin),
    "bin untied": (False, 1, save_bin),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_in_every_layout_answer_teach_and_run(
    capsys: pytest.CaptureFixture[str], prompts: Path, tmp_path: Path, layout: str
) -> None:
    tied, files, save = LAYOUTS[layout]
    path = tmp_path / "model"
    path.mkdir()
    save(tiny_llama(vocab_size=VOCAB, hidden_size=64, max_positions=256, tied=tied), path)
    save_table_tokenizer(path)
    assert len([*path.glob("*.safetensors"), *path.glob("*.bin")]) >= files
    store, run = tmp_path / "store", tmp_path / "run"
    target = ("--target", str(path), "--threads", "1")
    answer = ("data", "answer", str(prompts), "--out", str(store), "--max-tokens", "24", "--limit", "8", *target)
    assert code(*answer, "--dtype", "float32") == 0
    assert code("train", str(store), "--out", str(run), "--steps", "2", "--rows", "2", "--row-size", "64", *target) == 0
    answers = []
    for engine in ("transformers", "native") if native.available() else ("transformers",):
        ask = ("generate", "w9 w10", "--draft", str(run / "head"), "--engine", engine, "--dtype", "float32", *target)
        result = run_json(capsys, *ask, "--json", "--compare", *FAST)
        assert result["identical"] is True
        assert result["stats"]["draft_tokens"] > 0
        answers.append(result["token_ids"])
    assert answers[0] == answers[-1]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_head_of_the_base_model_drafts_for_a_fine_tune_with_a_word_about_it(
    capsys: pytest.CaptureFixture[str], model: Path, head: Path, tmp_path: Path, engine: str
) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    tuned = Path(copytree(model, tmp_path / "tuned"))
    weights = load_file(tuned / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    shifted = {name: each + 0.03 * torch.randn(each.shape, generator=generator) for name, each in weights.items()}
    save_file(shifted, tuned / "model.safetensors", {"format": "pt"})
    silent = Path(copytree(head, tmp_path / "silent"))  # as published heads are: nothing says what it was trained for
    save_file(load_file(silent / "model.safetensors"), silent / "model.safetensors", {"format": "pt"})

    def ask(target: Path, draft: Path) -> tuple[Any, str]:
        options = ("--engine", engine, "--dtype", "float32", "--threads", "1", "--json", "--compare", *FAST)
        capsys.readouterr()
        assert code("generate", "w9 w10", "--target", str(target), "--draft", str(draft), *options) == 0
        captured = capsys.readouterr()
        return json.loads(captured.out), captured.err

    result, said = ask(tuned, head)
    assert result["identical"] is True
    assert result["stats"]["draft_tokens"] > 0
    assert said == (
        f"eyas: draft head {head} was trained for {model.name}, and {tuned} has other weights: answers stay exact, but "
        "fewer guesses may be accepted\n"
    )
    base, said = ask(model, head)
    assert (base["identical"], said) == (True, "")
    assert base["token_ids"] != result["token_ids"]
    assert ask(tuned, silent)[1] == ""

    common = ("--target", str(tuned), "--draft", str(head), "--engine", engine, "--dtype", "float32", "--threads", "1")
    questions = tmp_path / "questions.jsonl"
    questions.write_text("".join(f'{{"id": "{number}", "turns": ["w9 w10 w{number}"]}}\n' for number in range(4)))
    budget = ("--num-steps", "2", "--topk", "2", "--num-draft-tokens", "3")
    for command in (
        ("calibrate", str(questions), "--max-tokens", "12"),
        ("tune", "--prompts", str(questions), "--effort", "quick", "--out", str(tmp_path / "profile.json"), *budget),
    ):
        capsys.readouterr()
        assert code(*command, *common) == 0
        assert "was trained for" in capsys.readouterr().err


@pytest.mark.parametrize("engine", ENGINES)
def test_a_model_drafts_for_a_model(
    capsys: pytest.CaptureFixture[str], model: Path, tmp_path: Path, engine: str
) -> None:
    common = ("generate", "w9 w10", "--json", "--compare", *FAST, "--target", str(model), "--engine", engine)
    common += ("--dtype", "float32", "--threads", "1", "--policy", "chain")
    result = run_json(capsys, *common, "--draft", str(model))
    assert result["identical"] is True
    assert result["stats"]["acceptance_length"] > 5  # nobody knows it better than itself
    assert run_json(capsys, *common, "--draft", "ngram")["identical"] is True
    other = Path(copytree(model, tmp_path / "other"))
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["w20"], vocabulary["w21"] = vocabulary["w21"], vocabulary["w20"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert code(*common, "--draft", str(other)) == 2
    assert "another tokenizer than the target: 2 ids differ" in capsys.readouterr().err


@pytest.mark.parametrize("engine", ENGINES)
def test_the_bench_agrees_with_transformers_own_generate(
    model: Path, head: Path, prompts: Path, tmp_path: Path, engine: str
) -> None:
    out = tmp_path / "results.json"
    done = code(
        *("bench", "--questions", str(prompts), "--limit", "3", "--out", str(out), "--check-reference"),
        *("--target", str(model), "--draft", str(head), "--engine", engine, "--dtype", "float32"),
        *("--threads", "1", *FAST),
    )
    assert done == 0
    total = json.loads(out.read_text())["summary"]["total"]
    assert list(total) == ["none", "chain", "static", "dynamic", "transformers"]
    for numbers in total.values():
        assert numbers["identical"] == {"none": {"same": 3, "of": 3}, "transformers": {"same": 3, "of": 3}}


def test_commands_go_on_where_they_stopped(
    capsys: pytest.CaptureFixture[str], model: Path, head: Path, prompts: Path
) -> None:
    run = head.parent
    store = run.parent / "store"
    capsys.readouterr()
    answer = ("data", "answer", str(prompts), "--out", str(store), "--max-tokens", "24", "--batch", "8")
    assert code(*answer, "--target", str(model), "--engine", "transformers", "--dtype", "float32") == 0
    assert "0 prompts answered" in capsys.readouterr().out
    train = ("train", str(store), "--out", str(run), "--target", str(model), "--threads", "1")
    result = run_json(capsys, *train, "--steps", "7", "--rows", "2", "--row-size", "64", "--evaluate-every", "3")
    assert result["step"] == 7
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3, 4, 5, 6, 7]


def test_info_describes_a_model(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    facts = run_json(capsys, "info", "--json", "--target", str(model), "--load", "--threads", "1")
    assert facts["target"]["vocab_size"] == VOCAB
    assert facts["target"]["chat_template"] is True
    assert facts["loaded"]["engine"] in ("native", "transformers")
    assert facts["versions"]["python"].startswith("3.")


@pytest.mark.skipif(not native.available(), reason=native.reason())
def test_profile_measures_what_it_promises(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    result = run_json(
        capsys,
        *("profile", "--json", "--target", str(model), "--dtype", "float32", "--threads", "1"),
        *("--context", "32", "--repeats", "1"),
    )
    assert {"bandwidth_gb_s", "peak_gflop_s", "weights", "command", "machine", "versions", "commit"} <= set(result)
    weights = result["weights"]["float32"]
    assert {"bytes", "forward_ms", "limit_ms", "draft_level_ms", "prefill_tokens_s"} <= set(weights)
    assert all(milliseconds > 0 for milliseconds in weights["forward_ms"].values())


@pytest.mark.skipif(not native.available(), reason=native.reason())
def test_perplexity_agrees_with_transformers(capsys: pytest.CaptureFixture[str], model: Path, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"w{9 + i * i % 23}" for i in range(150)))
    ids = load_source(str(model)).tokenizer.encode(text.read_text())[:130]
    twin = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    losses = []
    for part in (ids[:100], ids[100:]):
        with torch.inference_mode():
            logits = twin(torch.tensor([part])).logits[0, :-1]
        losses.append(torch.nn.functional.cross_entropy(logits, torch.tensor(part[1:]), reduction="none"))
    expected = float(torch.cat(losses).mean().exp())

    options = ("--target", str(model), "--tokens", "130", "--window", "100", "--threads", "1", "--json")
    result = run_json(capsys, "perplexity", str(text), *options)
    assert (result["tokens"], result["predicted"], result["compared"]) == (130, 128, 130)
    assert result["reference"]["perplexity"] == pytest.approx(expected, rel=1e-5)
    types = result["types"]
    assert list(types) == ["float32", "bfloat16", "int8", "q4"]
    assert types["float32"]["perplexity"] == pytest.approx(expected, rel=1e-5)
    assert types["float32"]["logits_error"] < 1e-5 < types["bfloat16"]["logits_error"] < 0.1
    assert types["bfloat16"]["perplexity"] == pytest.approx(expected, rel=0.1)
    assert types["float32"]["same_argmax"] == 1 and 0 < types["int8"]["kl_divergence"] < 0.1

    alone = run_json(capsys, "perplexity", str(text), *options, "--no-reference", "--dtype", "float32")
    assert alone["types"]["float32"]["perplexity"] == types["float32"]["perplexity"]
    assert alone["reference"]["perplexity"] is alone["types"]["float32"]["logits_error"] is None
    assert code("perplexity", str(text), "--target", str(model), "--window", "999") == 2
    assert code("perplexity", str(tmp_path / "none.txt"), "--target", str(model)) == 2
    assert "window of 999 tokens" in capsys.readouterr().err


@pytest.mark.slow
def test_the_default_model_answers_alike_with_every_policy(capsys: pytest.CaptureFixture[str]) -> None:
    for policy in ("dynamic", "static", "chain"):
        common = ("generate", "Name three colours.", "--json", "--compare", "--max-tokens", "32")
        result = run_json(capsys, *common, "--policy", policy)
        assert result["identical"] is True
        assert result["stats"]["acceptance_length"] > 1.2
        assert any(colour in result["text"].lower() for colour in ("red", "blue", "green"))
