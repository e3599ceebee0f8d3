"""Text layer: streaming equals one-shot decoding, stop strings act as for a reader going character by character."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from eyas.errors import InvalidInputError
from eyas.policies import StaticPolicy
from eyas.text import IncrementalDetokenizer, StopStrings, TextTokenizer
from eyas.tree import Floats
from support.answers import Answered, answer, scripted
from support.drafters import oracle
from support.tiny import TableTarget

TEXTS = (
    "안녕하세요 세계! 한국어로 답합니다.",
    "Příliš žluťoučký kůň úpěl ďábelské ódy",
    "family 👨‍👩‍👧‍👦, flag 🏳️‍🌈, thumb 👍🏽, e\u0301",
    "def f(x):\n\treturn x ** 2  # ünïcode\n",
    " two  spaces  ",
    "\ufffd is a character of its own",
)

# --- tiny tokenizers, one per way of decoding ------------------------------------------------------------------


def byte_level() -> TextTokenizer:
    """Token ids 0..255 are bytes (in the alphabet's order), then a few merged pieces and special tokens."""
    vocab = {char: index for index, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    for piece in ("ab", "Ġa", "íķ"):  # the last: the first two bytes of 한
        vocab[piece] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab, [("a", "b"), ("Ġ", "a"), ("í", "ķ")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken("<|end|>", special=True), AddedToken("→tool←", special=False)])
    return TextTokenizer(tokenizer)


def byte_fallback(strip: bool = True) -> TextTokenizer:
    """Llama-2's way: pieces with ▁ for space, everything else as <0x..> tokens."""
    pieces = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abcdefghijklmnopqrstuvwxyz.,!<>0"]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    prepend = [normalizers.Prepend("▁")] if strip else []
    tokenizer.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    tokenizer.add_tokens([AddedToken("<|end|>", special=True)])
    return TextTokenizer(tokenizer)


def word_level() -> TextTokenizer:
    """No decoder: tokens are joined by spaces."""
    tokenizer = Tokenizer(models.WordLevel({"the": 0, "cat": 1, "sat": 2, "한국": 3, "[UNK]": 4}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_tokens([AddedToken("<|end|>", special=True)])
    return TextTokenizer(tokenizer)


def metaspace() -> TextTokenizer:
    tokenizer = Tokenizer(models.BPE({"▁": 0, "a": 1, "▁a": 2, "b": 3, "한": 4}, []))
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_tokens([AddedToken("<|end|>", special=True)])
    return TextTokenizer(tokenizer)


def word_piece() -> TextTokenizer:
    """A decoder that is not understood token by token: the general window serves it."""
    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0, "play": 1, "##ing": 2, "##s": 3, "한": 4}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    tokenizer.add_tokens([AddedToken("<|end|>", special=True)])
    return TextTokenizer(tokenizer)


MAKERS = {maker.__name__: maker for maker in (byte_level, byte_fallback, word_level, metaspace, word_piece)}


def streamed(tokenizer: TextTokenizer, ids: list[int], skip_special: bool = True) -> tuple[list[str], str]:
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special)
    return [detokenizer.push(token) for token in ids], detokenizer.finish()


# --- incremental detokenisation --------------------------------------------------------------------------------


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("maker", [byte_level, byte_fallback])
def test_deltas_are_whole_characters_and_join_to_the_text(maker, text: str) -> None:
    tokenizer = maker()
    ids = tokenizer.encode(text)
    deltas, rest = streamed(tokenizer, ids)
    assert "".join(deltas) == text == tokenizer.decode(ids) == tokenizer.backend.decode(ids)
    assert rest == ""
    so_far = ""
    for delta in deltas:  # every prefix is a prefix of the text: no replacement character was shown and taken back
        so_far += delta
        assert text.startswith(so_far)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("maker", [byte_level, byte_fallback])
def test_a_cap_in_mid_character_equals_the_one_shot_decode(maker, text: str) -> None:
    tokenizer = maker()
    ids = tokenizer.encode(text)
    for length in range(len(ids) + 1):
        deltas, rest = streamed(tokenizer, ids[:length])
        assert "".join(deltas) + rest == tokenizer.decode(ids[:length])
        assert set(rest) <= {"\ufffd"}
        if maker is byte_level:
            assert tokenizer.decode(ids[:length]) == tokenizer.backend.decode(ids[:length])


def test_byte_fallback_keeps_valid_characters_beside_invalid_bytes() -> None:
    tokenizer = byte_fallback()
    han = tokenizer.encode("한")[1:]  # without the ▁ in front
    assert tokenizer.decode([*han, *han[:2]]) == "한\ufffd\ufffd"
    assert tokenizer.decode([han[0], han[0], tokenizer.encode("a")[-1]]) == "\ufffd\ufffda"
    assert tokenizer.decode(han[:2]) == tokenizer.backend.decode(han[:2]) == "\ufffd\ufffd"


@pytest.mark.parametrize("maker", MAKERS.values(), ids=MAKERS.keys())
@pytest.mark.parametrize("skip_special", [True, False])
def test_random_tokens_equal_the_backend(maker, skip_special: bool) -> None:
    tokenizer = maker()
    rng = random.Random(3)
    size = tokenizer.vocab_size
    # Byte tokens of the fallback vocabulary are left to the test above: only there we keep more than the backend.
    choices = [*range(2), *range(258, size)] if maker is byte_fallback else list(range(size))
    for _ in range(300):
        ids = rng.choices(choices, k=rng.randrange(12))
        deltas, rest = streamed(tokenizer, ids, skip_special)
        expected = tokenizer.backend.decode(ids, skip_special_tokens=skip_special)
        assert "".join(deltas) + rest == expected == tokenizer.decode(ids, skip_special)


@given(st.lists(st.integers(0, 262), max_size=40))
def test_any_bytes_at_all(ids: list[int]) -> None:
    tokenizer = BYTE_LEVEL
    deltas, rest = streamed(tokenizer, ids)
    assert "".join(deltas) + rest == tokenizer.backend.decode(ids)


@given(st.lists(st.integers(0, 290), max_size=40))
def test_any_bytes_at_all_with_byte_fallback(ids: list[int]) -> None:
    tokenizer = BYTE_FALLBACK
    deltas, rest = streamed(tokenizer, ids)
    assert "".join(deltas) + rest == tokenizer.decode(ids)
    backend = tokenizer.backend.decode(ids)
    if "\ufffd" not in backend:
        assert tokenizer.decode(ids) == backend


BYTE_LEVEL, BYTE_FALLBACK = byte_level(), byte_fallback()


@pytest.mark.parametrize("stray", [0x80, 0xFF, 0xC0, 0xE3, 0xF0])
@pytest.mark.parametrize("maker", [byte_level, byte_fallback])
def test_text_flows_on_after_a_stray_byte(maker, stray: int) -> None:
    tokenizer = maker()
    letter = tokenizer.backend.token_to_id("a")
    if maker is byte_level:
        bad = next(token for token in range(256) if tokenizer.pieces.of(token) == bytes([stray]))
    else:
        bad = tokenizer.backend.token_to_id(f"<0x{stray:02X}>")
    deltas, rest = streamed(tokenizer, [letter, bad] + [letter] * 500)
    assert "".join(deltas[:3]) == "a\ufffda"
    assert deltas[3:] == ["a"] * 499
    assert rest == ""


def test_the_general_window_flushes_and_stays_short() -> None:
    """A decoder of unknown kind over bytes: what the window may hold is bounded, whatever comes."""
    backend = byte_level().backend
    backend.decoder = decoders.Sequence([decoders.Replace("\u2400", ""), decoders.ByteLevel()])
    tokenizer = TextTokenizer(backend)
    assert tokenizer.pieces is None
    lengths = []
    detokenizer = IncrementalDetokenizer(tokenizer)
    decode = detokenizer.state._decode

    def watched(ids: list[int]) -> str:
        lengths.append(len(ids))
        return decode(ids)

    detokenizer.state._decode = watched
    letter, bad = backend.token_to_id("a"), backend.token_to_id("ÿ")
    deltas = [detokenizer.push(token) for token in [letter, bad] + [letter] * 500 + [bad] * 500]
    assert deltas[3:502] == ["a"] * 499
    assert "".join(deltas) + detokenizer.finish() == "a\ufffd" + "a" * 500 + "\ufffd" * 500
    assert max(lengths) <= 16
    for text in TEXTS:
        ids = tokenizer.encode(text)
        parts, rest = streamed(tokenizer, ids)
        assert "".join(parts) + rest == text


def test_special_tokens_are_skipped_or_shown() -> None:
    tokenizer = byte_level()
    end, a = tokenizer.backend.token_to_id("<|end|>"), tokenizer.backend.token_to_id("a")
    tool = tokenizer.backend.token_to_id("→tool←")
    assert tokenizer.decode([a, end, tool, a]) == "a→tool←a"
    assert tokenizer.decode([a, end, a], skip_special=False) == "a<|end|>a"
    lead, middle, last = tokenizer.encode("안")  # a special token inside a character does not break it
    assert tokenizer.decode([lead, end, middle, last]) == "안"


def test_leading_space_is_dropped_once() -> None:
    tokenizer = byte_fallback()
    space, a = tokenizer.backend.token_to_id("▁"), tokenizer.backend.token_to_id("a")
    for ids in ([space, space, a], [a, space], [space], [tokenizer.backend.token_to_id("<|end|>"), space, a]):
        assert "".join(streamed(tokenizer, ids)[0]) == tokenizer.backend.decode(ids)


def test_ids_outside_the_vocabulary() -> None:
    tokenizer = byte_level()
    a = tokenizer.backend.token_to_id("a")
    assert tokenizer.decode([a, tokenizer.vocab_size + 5, a]) == "aa"
    with pytest.raises(InvalidInputError, match="not negative, got -1"):
        tokenizer.decode([-1])


# --- the wrapper -----------------------------------------------------------------------------------------------


def test_token_text_spells_out_what_cannot_be_shown() -> None:
    tokenizer = byte_level()
    lead, last = tokenizer.encode("한")  # a merged pair of bytes, and the third
    assert tokenizer.token_text(lead) == "<0xED><0x95>"
    assert tokenizer.token_text(last) == "<0x9C>"
    assert tokenizer.token_text(tokenizer.backend.token_to_id("<|end|>")) == "<|end|>"
    assert tokenizer.token_text(tokenizer.backend.token_to_id("Ġa")) == " a"


def test_vocab_size_counts_added_tokens() -> None:
    assert byte_level().vocab_size == 256 + 3 + 2


def test_bad_text_is_refused() -> None:
    tokenizer = byte_level()
    with pytest.raises(InvalidInputError, match="must be a str, got bytes"):
        tokenizer.encode(b"bytes")  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="surrogate"):
        tokenizer.encode("half \ud83d")


CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def chat(template: str | None) -> TextTokenizer:
    return TextTokenizer(byte_level().backend, template, {"bos_token": "<s>", "eos_token": "</s>"})


def test_chat_is_rendered_and_encoded_by_the_template() -> None:
    tokenizer = chat(CHATML)
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    expected = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHo<|im_end|>\n"
    assert tokenizer.render_chat(messages, add_generation_prompt=False) == expected
    assert tokenizer.render_chat(messages) == expected + "<|im_start|>assistant\n"
    assert tokenizer.encode_chat(messages) == tokenizer.encode(tokenizer.render_chat(messages), add_special=False)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}", "<s>Hi 한</s>"),
        ("{{ messages | tojson }}", '[{"role": "user", "content": "Hi 한"}]'),
        ("{% generation %}{{ messages[0].role }}{% endgeneration %}!", "user!"),
        ("{% for m in messages %}{% break %}{% endfor %}{{ strftime_now('%%') }}", "%"),
        ("{% if tools %}tools{% else %}none{% endif %}{{ thinking }}", "none7"),
    ],
)
def test_templates_find_what_they_expect(template: str, expected: str) -> None:
    assert chat(template).render_chat([{"role": "user", "content": "Hi 한"}], thinking=7) == expected


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        (None, [{"role": "user", "content": "x"}], "no chat template"),
        (CHATML, [], "non-empty list"),
        (CHATML, "Hi", "non-empty list"),
        (CHATML, [{"content": "x"}], r"messages\[0\] must be an object with a 'role'"),
        (CHATML, [{"role": "user", "content": "x"}, {"role": "user"}], r"messages\[1\] has no 'content'"),
        (CHATML, [{"role": "user", "content": None}], "refused the messages"),
        ("{{ raise_exception('roles must alternate') }}", [{"role": "user", "content": "x"}], "roles must alternate"),
        ("{% if %}", [{"role": "user", "content": "x"}], "not valid Jinja"),
        ("{{ messages.append(1) }}", [{"role": "user", "content": "x"}], "refused"),
        ("{{ ''.__class__.__mro__ }}", [{"role": "user", "content": "x"}], "refused"),
    ],
)
def test_bad_chats_are_refused_with_a_reason(template: str | None, messages: object, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        chat(template).render_chat(messages)  # type: ignore[arg-type]


# --- stop strings ----------------------------------------------------------------------------------------------


def read_by_character(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The rule itself: stop at the first character that completes a stop string, cut before the longest one."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


def run_stops(pieces: list[str], stops: list[str]) -> tuple[list[str], str | None]:
    watcher = StopStrings(stops)
    shown = [watcher.push(piece) for piece in pieces]
    return [*shown, watcher.finish()], watcher.matched


@given(
    st.lists(st.text("ab\n", max_size=4), max_size=12),
    st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3),
)
def test_stop_strings_act_as_for_a_reader_going_by_character(pieces: list[str], stops: list[str]) -> None:
    shown, matched = run_stops(pieces, stops)
    assert ("".join(shown), matched) == read_by_character("".join(pieces), stops)


@given(st.lists(st.text("ab", max_size=3), max_size=8), st.lists(st.text("ab", min_size=1, max_size=5), max_size=3))
def test_nothing_is_held_that_could_be_shown(pieces: list[str], stops: list[str]) -> None:
    watcher = StopStrings(stops)
    seen = shown = ""
    for piece in pieces:
        seen += piece
        shown += watcher.push(piece)
        if watcher.matched:
            break
        begun = [seen[at:] for at in range(len(seen)) if any(stop.startswith(seen[at:]) for stop in stops)]
        assert seen == shown + max(begun, key=len, default="")


@pytest.mark.parametrize(
    ("pieces", "stops", "shown", "matched"),
    [
        (["Hello", "\nUs", "er:", " x"], ["\nUser:"], "Hello", "\nUser:"),
        (["Hello", "\nUs", "ually"], ["\nUser:"], "Hello\nUsually", None),
        (["Hello", "\nUs"], ["\nUser:"], "Hello\nUs", None),
        (["the", " end", " of"], ["the end"], "", "the end"),
        (["x", "a", "b", "c"], ["ab", "abc"], "x", "ab"),
        (["xabc"], ["abc", "ab"], "x", "ab"),
        (["xabc"], ["bc", "abc"], "x", "abc"),  # both end at the same character
        (["aab"], ["ab"], "a", "ab"),
        (["a", "a", "ab"], ["aab"], "a", "aab"),
        (["한", "국", "어"], ["국어"], "한", "국어"),
        (["stop"], ["stop"], "", "stop"),
        (["anything"], [], "anything", None),
    ],
)
def test_stop_strings_by_hand(pieces: list[str], stops: list[str], shown: str, matched: str | None) -> None:
    parts, found = run_stops(pieces, stops)
    assert ("".join(parts), found) == (shown, matched)


def test_held_text_comes_out_as_soon_as_the_match_fails() -> None:
    watcher = StopStrings(["\nUser:"])
    assert [watcher.push(piece) for piece in ("Hi", "\nUs", "u", "al")] == ["Hi", "", "\nUsu", "al"]
    assert watcher.finish() == ""


def test_nothing_is_shown_after_a_match() -> None:
    watcher = StopStrings(["."])
    assert [watcher.push("a.b"), watcher.push("c"), watcher.finish()] == ["a", "", ""]
    assert watcher.matched == "."


@pytest.mark.parametrize("stops", [[""], ["ok", ""], [None], [3]])
def test_empty_stop_strings_are_refused(stops: list) -> None:
    with pytest.raises(InvalidInputError, match=r"stop\[\d\] must be a non-empty string"):
        StopStrings(stops)


def test_one_stop_string_may_come_bare() -> None:
    assert run_stops(["x###y"], "###") == (["x", ""], "###")  # type: ignore[arg-type]


# --- through the loop ------------------------------------------------------------------------------------------


class Reciting(TableTarget):
    """Says the same tokens whatever the prompt, one after the other."""

    def __init__(self, tokens: list[int], vocab_size: int) -> None:
        super().__init__(vocab_size, max_positions=len(tokens) + 2)
        self._said = tokens

    def logits(self, prefix: Sequence[int]) -> Floats:
        logits = np.zeros(self.info.vocab_size, np.float32)
        if len(prefix) <= len(self._said):
            logits[self._said[len(prefix) - 1]] = 9.0
        return logits


def recited(tokenizer: TextTokenizer, ids: list[int], block: int, cap: int) -> Answered:
    """The answer in blocks of ``block`` tokens at most, up to ``cap`` tokens."""
    target = Reciting(ids, tokenizer.vocab_size)
    drafter = scripted(target, oracle, [0]) if block > 1 else None
    policy = StaticPolicy.chain(max(1, block - 1))
    ours = answer(target, [0], drafter, policy=policy, tokenizer=tokenizer, max_tokens=cap)
    assert ours.tokens == ids[:cap]
    assert cap <= block + 1 or max(ours.blocks) == block
    return ours


@pytest.mark.parametrize("block", range(1, 7))
@pytest.mark.parametrize("text", TEXTS[:3])
@pytest.mark.parametrize("maker", [byte_level, byte_fallback])
def test_blocks_of_any_size_stream_the_same_text(maker, text: str, block: int) -> None:
    """Cut anywhere, in mid-character too: the deltas join to the one-shot decode, and none is taken back."""
    tokenizer = maker()
    ids = tokenizer.encode(text)
    for cap in (*range(1, len(ids), 4), len(ids)):  # 4: after each byte of a character of three
        ours = recited(tokenizer, ids, block, cap)
        assert ours.text == tokenizer.decode(ids[:cap])
        shown = ""
        for step in ours.steps[:-1]:
            shown += step.text
            assert text.startswith(shown)
    assert ours.text == text


@pytest.mark.parametrize("block", [1, 6])
@pytest.mark.parametrize("maker", [byte_level, byte_fallback])
def test_a_stray_byte_holds_no_later_block_back(maker, block: int) -> None:
    tokenizer = maker()
    letter = tokenizer.backend.token_to_id("a")
    stray = tokenizer.backend.token_to_id("<0xFF>" if maker is byte_fallback else "ÿ")
    ours = recited(tokenizer, [letter, stray, *[letter] * 500], block, 502)
    assert ours.text == "a\ufffd" + "a" * 500
    assert [len(step.text) for step in ours.steps] == [len(step.tokens) for step in ours.steps]
