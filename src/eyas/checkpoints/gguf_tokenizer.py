"""The tokenizer inside a GGUF file, rebuilt as a ``tokenizers.Tokenizer``.

Two families: "gpt2" (byte-level BPE; the file names the splitting rule used before merging) and "llama"
(SentencePiece-style BPE with byte fallback, merges implied by the scores of the pieces).
"""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from eyas.checkpoints.gguf import GGUFFile
from eyas.errors import CheckpointError, UnsupportedModelError

_CONTROL, _USER_DEFINED = 3, 4  # tokenizer.ggml.token_type

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"

# Splitting rules by tokenizer.ggml.pre, applied one after the other to the pieces of the one before.
_SPLITS: dict[str, tuple[str, ...]] = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
    "gpt-2": (_GPT2,),
    "smollm": (r"\p{N}", _GPT2),  # every digit stands alone
    "qwen2": (_CONTRACTIONS + _WORDS + r"|\p{N}" + _REST,),
    "llama-bpe": (_CONTRACTIONS + _WORDS + r"|\p{N}{1,3}" + _REST,),
    "tekken": (
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
        r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
}
_ALIASES = {
    "starcoder": "smollm", "refact": "smollm", "command-r": "smollm", "codeshell": "smollm",
    "gpt2": "gpt-2", "phi-2": "gpt-2", "mpt": "gpt-2", "olmo": "gpt-2", "jais": "gpt-2",
    "stablelm2": "qwen2", "deepseek-r1-qwen": "qwen2", "megrez": "qwen2",
    "llama3": "llama-bpe", "llama-v3": "llama-bpe", "smaug-bpe": "llama-bpe", "dbrx": "llama-bpe",
}  # fmt: skip


def read_tokenizer(file: GGUFFile) -> Tokenizer:
    """Build the tokenizer that the file's metadata describes.

    Raises:
        CheckpointError: vocabulary entries missing or inconsistent.
        UnsupportedModelError: a tokenizer family or splitting rule that is not known here.
    """
    meta = file.metadata
    family = meta.get("tokenizer.ggml.model")
    tokens = _strings(file, "tokenizer.ggml.tokens")
    kinds = meta.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    if len(kinds) != len(tokens):
        raise CheckpointError(f"{file.path}: {len(tokens)} tokens but {len(kinds)} token types in the metadata")
    vocab = {token: index for index, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise CheckpointError(f"{file.path}: {len(tokens) - len(vocab)} tokens in the vocabulary occur twice")
    if family == "gpt2":
        tokenizer = _byte_level(file, vocab)
    elif family == "llama":
        tokenizer = _sentencepiece(file, vocab, tokens)
    else:
        raise UnsupportedModelError(f"{file.path}: tokenizer {family!r} is not supported; 'gpt2' and 'llama' are")
    tokenizer.add_tokens(
        [
            AddedToken(token, special=kind == _CONTROL, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind in (_CONTROL, _USER_DEFINED)
        ]
    )
    return _with_bos_eos(file, tokenizer, tokens)


def _byte_level(file: GGUFFile, vocab: dict[str, int]) -> Tokenizer:
    pre = file.metadata.get("tokenizer.ggml.pre", "default")
    rule = _ALIASES.get(pre, pre)
    if rule not in _SPLITS:
        known = ", ".join(sorted(_SPLITS.keys() | _ALIASES.keys()))
        raise UnsupportedModelError(f"{file.path}: pre-tokenizer {pre!r} is not known; known: {known}")
    merges = []
    for merge in _strings(file, "tokenizer.ggml.merges"):
        left, space, right = merge[1:].partition(" ")  # a piece may itself begin with a space, never be empty
        if not space:
            raise CheckpointError(f"{file.path}: tokenizer.ggml.merges holds {merge!r}, not two pieces")
        merges.append((merge[:1] + left, right))
    try:
        # Llama 3 takes a word that is in the vocabulary whole, whatever its merges say.
        model = models.BPE(vocab, merges, ignore_merges=rule in ("llama-bpe", "tekken"))
    except Exception as error:  # the Rust side raises bare Exception: a merge of pieces outside the vocabulary
        raise CheckpointError(f"{file.path}: tokenizer.ggml.merges does not fit the vocabulary: {error}") from None
    tokenizer = Tokenizer(model)
    if rule == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in _SPLITS[rule]]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(file: GGUFFile, vocab: dict[str, int], tokens: list[str]) -> Tokenizer:
    scores = file.metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise CheckpointError(
            f"{file.path}: tokenizer.ggml.scores should hold a score for each of {len(tokens)} tokens"
        )
    unknown = file.metadata.get("tokenizer.ggml.unknown_token_id")
    model = models.BPE(
        vocab,
        _implied_merges(vocab, scores),
        unk_token=tokens[unknown] if unknown is not None else None,
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    prefix = file.metadata.get("tokenizer.ggml.add_space_prefix", True)
    tokenizer.normalizer = normalizers.Sequence(
        [*([normalizers.Prepend("▁")] if prefix else []), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            *([decoders.Strip(" ", 1, 0)] if prefix else []),
        ]
    )
    return tokenizer


def _implied_merges(vocab: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """SentencePiece joins the neighbours whose joined piece scores best: that order as a list of merges."""
    merges = []
    for piece, index in vocab.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in vocab and right in vocab:
                merges.append((-scores[index], vocab[left], vocab[right], left, right))
    return [(left, right) for *_, left, right in sorted(merges)]


def _with_bos_eos(file: GGUFFile, tokenizer: Tokenizer, tokens: list[str]) -> Tokenizer:
    """Let ``encode`` add the begin and end marks that the file asks for."""
    meta = file.metadata
    implied = (
        meta.get("tokenizer.ggml.model") == "llama"
        or _ALIASES.get(meta.get("tokenizer.ggml.pre", ""), meta.get("tokenizer.ggml.pre")) == "llama-bpe"
    )
    marks = {}
    for name, default in (("bos", implied), ("eos", False)):
        index = meta.get(f"tokenizer.ggml.{name}_token_id")
        if meta.get(f"tokenizer.ggml.add_{name}_token", default) and isinstance(index, int) and index < len(tokens):
            marks[name] = (tokens[index], index)
    if marks:
        parts: list[Any] = [*(m[0] for n, m in marks.items() if n == "bos"), "$A"]
        parts += [m[0] for n, m in marks.items() if n == "eos"]
        tokenizer.post_processor = processors.TemplateProcessing(single=parts, special_tokens=list(marks.values()))
    return tokenizer


def _strings(file: GGUFFile, key: str) -> list[str]:
    value = file.metadata.get(key)
    if not isinstance(value, list) or not value or not isinstance(value[0], str):
        raise CheckpointError(f"{file.path}: metadata {key} should be a list of strings, found {type(value).__name__}")
    return value
