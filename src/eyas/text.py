"""Between text and token ids: tokenizer, chat templates, incremental detokenisation, stop strings."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property, lru_cache
from typing import Any

from tokenizers import Tokenizer

from eyas.errors import InvalidInputError

Message = Mapping[str, Any]
"""One chat turn: ``{"role": "user", "content": "..."}``; other keys go to the template untouched."""


class TextTokenizer:
    """A ``tokenizers.Tokenizer`` with its chat template.

    ``decode`` equals the wrapped tokenizer's decode on all valid UTF-8. In a byte-fallback vocabulary, a run of byte
    tokens with an invalid byte in it keeps its valid characters here and gets one U+FFFD per invalid byte, where
    ``tokenizers`` gives up the whole run: what has been streamed can then never be contradicted by a later byte.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        chat_template: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
    ) -> None:
        """``special_tokens``: what templates may refer to, e.g. ``{"bos_token": "<s>", "eos_token": "</s>"}``."""
        self.backend = tokenizer
        self.chat_template = chat_template
        self.special_tokens = dict(special_tokens or {})
        tokenizer.no_truncation()
        tokenizer.no_padding()

    @cached_property
    def vocab_size(self) -> int:
        """Ids run below this number (added tokens included); a model's logits may be wider, padded."""
        return max(self.backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Token ids of ``text``; ``add_special`` adds the begin (end) marks that the tokenizer defines, if any."""
        if not isinstance(text, str):
            raise InvalidInputError(f"text to encode must be a str, got {type(text).__name__}")
        try:
            return list(self.backend.encode(text, add_special_tokens=add_special).ids)
        except (UnicodeEncodeError, TypeError):  # which of them depends on the version of tokenizers
            raise InvalidInputError("the text holds half of a surrogate pair, which no encoding can express") from None

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """The text of ``ids``, all at once. Ids past the vocabulary are silent; negative ones an InvalidInputError."""
        detokenizer = IncrementalDetokenizer(self, skip_special)
        if isinstance(detokenizer.state, _WindowState):
            return str(self.backend.decode(list(ids), skip_special_tokens=skip_special))
        return "".join([detokenizer.push(token) for token in ids]) + detokenizer.finish()

    def token_text(self, token: int) -> str:
        """One token for human eyes: specials spelled out, bytes that are no whole character as ``<0xED><0x95>``."""
        if self.pieces is None:
            return str(self.backend.decode([token], skip_special_tokens=False))
        return (self.pieces.of(token) or b"").decode("utf-8", _SPELL_BYTES)

    def render_chat(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The conversation as one string, by the model's own template.

        Args:
            messages: at least one ``{"role": str, "content": ...}``.
            add_generation_prompt: end with the opening of the assistant's turn.
            tools: function schemas, for templates that know them.
            variables: anything else the template understands (``enable_thinking=False``).

        Raises:
            InvalidInputError: no template, malformed messages, or the template's own refusal.
        """
        if self.chat_template is None:
            raise InvalidInputError("this model has no chat template; give it a plain prompt (CLI: --raw)")
        _check_messages(messages)
        from jinja2 import TemplateError

        try:
            return str(
                _compile(self.chat_template).render(
                    **self.special_tokens,
                    messages=list(messages),
                    tools=tools,
                    documents=None,
                    add_generation_prompt=add_generation_prompt,
                    **variables,
                )
            )
        except (TemplateError, TypeError) as error:
            raise InvalidInputError(f"the chat template refused the messages: {error}") from None

    def encode_chat(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> list[int]:
        """Token ids of ``render_chat``; the template writes its own begin mark, so none is added."""
        return self.encode(self.render_chat(messages, add_generation_prompt, tools, **variables), add_special=False)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids that ``skip_special`` leaves out."""
        added = self.backend.get_added_tokens_decoder()
        return frozenset(index for index, token in added.items() if token.special)

    @cached_property
    def pieces(self) -> _Pieces | None:
        """How single tokens become bytes; None where the decoder is not of a kind that works token by token."""
        return _pieces_of(self.backend)


def _check_messages(messages: Sequence[Message]) -> None:
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise InvalidInputError(f"messages must be a non-empty list of {{role, content}} objects, got {messages!r:.80}")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InvalidInputError(f"messages[{index}] must be an object with a 'role' string, got {message!r:.80}")
        if "content" not in message and "tool_calls" not in message:
            raise InvalidInputError(f"messages[{index}] has no 'content'")


@lru_cache(maxsize=8)
def _compile(template: str) -> Any:
    """The template in a sandbox, with the functions that Hugging Face templates expect."""
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """``{% generation %}`` marks assistant text for training masks; here its body is simply printed."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(template)
    except TemplateError as error:
        raise InvalidInputError(f"the chat template is not valid Jinja: {error}") from None


# --- tokens to bytes -------------------------------------------------------------------------------------------

_SPELL_BYTES = "eyas.spell_bytes"
_ONE_EACH = "eyas.one_replacement_per_byte"


def _spell_bytes(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return "".join(f"<0x{byte:02X}>" for byte in error.object[error.start : error.end]), error.end


def _one_each(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error(_SPELL_BYTES, _spell_bytes)
codecs.register_error(_ONE_EACH, _one_each)


class _Pieces:
    """Token id -> its bytes, for decoders that work token by token.

    ``errors`` names how invalid bytes are shown; ``first`` (if given) makes the bytes of the first token of a text,
    where they differ; ``strip`` tells that one leading space of the text is dropped.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        rest: Callable[[str], bytes],
        first: Callable[[str], bytes] | None = None,
        errors: str = "replace",
        strip: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._rest = rest
        self._first = first or rest
        self.errors = errors
        self.strip = strip
        self._known: dict[int, bytes | None] = {}  # tokens of a text recur

    def of(self, token: int, first: bool = False) -> bytes | None:
        """None for ids past the vocabulary: logits are often padded to a round width."""
        if first:
            return self._make(token, self._first)
        if token not in self._known:
            self._known[token] = self._make(token, self._rest)
        return self._known[token]

    def _make(self, token: int, spell: Callable[[str], bytes]) -> bytes | None:
        if token < 0:
            raise InvalidInputError(f"token ids are not negative, got {token}")
        text = self._tokenizer.id_to_token(token)
        return None if text is None else spell(text)


@lru_cache(maxsize=1)
def _byte_of_char() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable Latin-1 stands for itself, the others follow from U+0100 in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


def _byte_level(piece: str) -> bytes:
    table = _byte_of_char()
    try:
        return bytes([table[char] for char in piece])
    except KeyError:  # an added token, written in plain text
        return piece.encode()


_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_fallback(piece: str) -> bytes:
    match = _BYTE_TOKEN.fullmatch(piece)
    return bytes([int(match[1], 16)]) if match else piece.encode()


def _pieces_of(tokenizer: Tokenizer) -> _Pieces | None:
    decoder = tokenizer.decoder
    if decoder is None:  # tokens joined by spaces
        return _Pieces(tokenizer, lambda piece: b" " + piece.encode(), str.encode)
    steps = _steps(json.loads(decoder.__getstate__()))
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return _Pieces(tokenizer, _byte_level)
    if kinds == ["Metaspace"]:
        mark = steps[0]["replacement"]
        drop = steps[0].get("prepend_scheme", "always") != "never"
        return _Pieces(
            tokenizer,
            lambda piece: piece.replace(mark, " ").encode(),
            lambda piece: piece.replace(mark, "" if drop else " ").encode(),
        )
    if kinds[:3] == ["Replace", "ByteFallback", "Fuse"] and "String" in steps[0]["pattern"]:
        mark, space = steps[0]["pattern"]["String"], steps[0]["content"]
        strips = [(step["content"], step["start"], step["stop"]) for step in steps[3:] if step["type"] == "Strip"]
        if len(strips) == len(steps) - 3 and strips in ([], [(" ", 1, 0)]):
            return _Pieces(
                tokenizer,
                lambda piece: _byte_fallback(piece.replace(mark, space)),
                errors=_ONE_EACH,
                strip=bool(strips),
            )
    return None


def _steps(state: dict[str, Any]) -> list[dict[str, Any]]:
    if state["type"] == "Sequence":
        return [step for inner in state["decoders"] for step in _steps(inner)]
    return [state]


class _ByteState:
    """Exact streaming: each token's bytes go through an incremental UTF-8 decoder."""

    def __init__(self, pieces: _Pieces) -> None:
        self._pieces = pieces
        self._utf8 = codecs.getincrementaldecoder("utf-8")(pieces.errors)
        self._first_token = True
        self._strip = pieces.strip

    def push(self, token: int) -> str:
        piece = self._pieces.of(token, self._first_token)
        if piece is None:
            return ""
        self._first_token = False
        return self._trim(self._utf8.decode(piece))

    def finish(self) -> str:
        text = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return self._trim(text)

    def _trim(self, text: str) -> str:
        if self._strip and text:
            self._strip = False
            return text.removeprefix(" ")
        return text


class _WindowState:
    """Streaming for any other decoder: decode a short window twice, with and without the new tokens.

    ``_ids`` holds the tokens of the last delta (context for the decoder) and those not yet shown. At most ``_HOLD``
    tokens wait for the end of a character, so that invalid bytes flush and the time stays linear.
    """

    _HOLD = 8

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._shown = 0  # tokens at the head of _ids whose text is out
        self._shown_text = ""

    def push(self, token: int) -> str:
        self._ids.append(token)
        text = self._decode(self._ids)
        waiting = len(self._ids) - self._shown
        if len(text) <= len(self._shown_text) or (text.endswith("\ufffd") and waiting < self._HOLD):
            return ""
        delta = text[len(self._shown_text) :]
        self._ids = self._ids[self._shown :]
        self._shown = len(self._ids)
        self._shown_text = self._decode(self._ids)
        return delta

    def finish(self) -> str:
        delta = self._decode(self._ids)[len(self._shown_text) :] if self._ids else ""
        self._ids, self._shown, self._shown_text = [], 0, ""
        return delta


class IncrementalDetokenizer:
    """Token ids in, text out, as soon as it is certain.

    The deltas joined, ``finish`` included, equal ``tokenizer.decode(ids)``. Bytes that may still become a character
    are held back; a byte that cannot is shown as U+FFFD at once.
    """

    def __init__(self, tokenizer: TextTokenizer, skip_special: bool = True) -> None:
        self._skip = tokenizer.special_ids if skip_special else frozenset()
        self.state: _ByteState | _WindowState
        if (pieces := tokenizer.pieces) is not None:
            self.state = _ByteState(pieces)
        else:
            backend = tokenizer.backend
            self.state = _WindowState(lambda ids: str(backend.decode(ids, skip_special_tokens=skip_special)))

    def push(self, token: int) -> str:
        """The text that ``token`` completes; "" while a character is unfinished."""
        return "" if token in self._skip else self.state.push(token)

    def finish(self) -> str:
        """What was held back: the remains of a character cut off by the end, as U+FFFD."""
        return self.state.finish()


# --- stop strings ----------------------------------------------------------------------------------------------


class StopStrings:
    """Cuts a stream of text before the first stop string, never showing a part of one.

    A reader going character by character stops at the first character that completes any stop string; if several end
    there, the text is cut before the longest.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        stops = [stops] if isinstance(stops, str) else list(stops)
        for index, stop in enumerate(stops):
            if not isinstance(stop, str) or not stop:
                raise InvalidInputError(f"stop[{index}] must be a non-empty string, got {stop!r}")
        self._stops = tuple(dict.fromkeys(stops))
        self._held = ""
        self.matched: str | None = None
        """The stop string that was met."""

    def push(self, delta: str, armed: bool = True) -> str:
        """Text that is safe to show now. After a match (see ``matched``) always "".

        ``armed=False``: a stop string completed by this text does not count; one only begun by it may count later.
        """
        if self.matched is not None or not delta:
            return ""
        text = self._held + delta
        held = len(self._held)
        found = [
            (at + len(stop), at, stop)
            for stop in self._stops
            if armed and (at := text.find(stop, max(0, held + 1 - len(stop)))) >= 0
        ]
        if found:
            _, start, self.matched = min(found)
            self._held = ""
            return text[:start]
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """The text held for a match that never came."""
        rest, self._held = self._held, ""
        return rest


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that begins ``stop`` without completing it."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
