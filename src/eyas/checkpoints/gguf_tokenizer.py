"""The tokenizer inside a GGUF file, rebuilt as a ``tokenizers.Tokenizer``.

Two families: "gpt2" (byte-level BPE; the file names the splitting rule used before merging) and "llama"
(SentencePiece-style BPE with byte fallback, merges implied by the scores of the pieces).
"""

from __future__ import annotations

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from eyas.checkpoints.gguf import CONTROL, USER_DEFINED, GGUFFile
from eyas.errors import CheckpointError, UnsupportedModelError

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
    family = file.get("tokenizer.ggml.model", str)
    tokens = file.strings("tokenizer.ggml.tokens")
    kinds = file.get("tokenizer.ggml.token_type", list) or [1] * len(tokens)
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
            AddedToken(token, special=kind == CONTROL, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind in (CONTROL, USER_DEFINED)
        ]
    )
    return _with_bos_eos(file, tokenizer, tokens)


def _rule(file: GGUFFile) -> str:
    pre = file.get("tokenizer.ggml.pre", str, "default") or "default"
    return _ALIASES.get(pre, pre)


def _byte_level(file: GGUFFile, vocab: dict[str, int]) -> Tokenizer:
    pre = file.get("tokenizer.ggml.pre", str, "default")
    rule = _rule(file)
    if rule not in _SPLITS:
        known = ", ".join(sorted(_SPLITS.keys() | _ALIASES.keys()))
        raise UnsupportedModelError(f"{file.path}: pre-tokenizer {pre!r} is not known; known: {known}")
    merges = []
    for merge in file.strings("tokenizer.ggml.merges"):
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
    scores = file.get("tokenizer.ggml.scores", list, [])
    if scores is None or len(scores) != len(tokens) or not isinstance(scores[0], int | float):
        raise CheckpointError(
            f"{file.path}: tokenizer.ggml.scores should hold a score for each of {len(tokens)} tokens"
        )
    unknown = file.token_id("unknown")
    model = models.BPE(
        vocab,
        _implied_merges(vocab, scores),
        unk_token=tokens[unknown] if unknown is not None else None,
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    prefix = file.get("tokenizer.ggml.add_space_prefix", bool, True)
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
    implied = file.get("tokenizer.ggml.model", str) == "llama" or _rule(file) == "llama-bpe"
    marks = {}
    for name, default in (("bos", implied), ("eos", False)):
        index = file.token_id(name)
        if file.get(f"tokenizer.ggml.add_{name}_token", bool, default) and index is not None:
            marks[name] = index
    if marks:
        parts = [":".join((tokens[marks["bos"]], "0"))] if "bos" in marks else []
        parts += ["$A:0"]
        parts += [":".join((tokens[marks["eos"]], "0"))] if "eos" in marks else []
        special = [(tokens[index], index) for index in dict.fromkeys(marks.values())]
        tokenizer.post_processor = processors.TemplateProcessing(single=parts, special_tokens=special)
    return tokenizer
