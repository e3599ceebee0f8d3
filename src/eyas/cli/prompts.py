"""From what the user typed to the tokens a model is asked."""

from __future__ import annotations

import sys

from eyas.errors import InvalidInputError
from eyas.text import TextTokenizer


def read_prompt(prompt: str) -> str:
    """The prompt itself, or standard input for "-".

    Raises:
        InvalidInputError: an empty prompt, or standard input that is not UTF-8 text.
    """
    if prompt == "-":
        try:
            prompt = sys.stdin.read()
        except UnicodeDecodeError as error:
            raise InvalidInputError(f"standard input is not UTF-8 text: {error}") from None
    if not prompt.strip():
        raise InvalidInputError("the prompt is empty; give a question, or - to read one from standard input")
    return prompt


def opening(system: str | None) -> list[dict[str, str]]:
    """The messages a conversation starts with."""
    return [] if system is None else [{"role": "system", "content": system}]


def encode_prompt(tokenizer: TextTokenizer, prompt: str, *, raw: bool = False, system: str | None = None) -> list[int]:
    """Token ids of a question in the model's chat template, or of plain text to go on with.

    Raises:
        InvalidInputError: a system message without a chat to put it into, or a model without a chat template.
    """
    if raw:
        if system is not None:
            raise InvalidInputError("--system needs the chat template; leave out --raw")
        return tokenizer.encode(prompt)
    return tokenizer.encode_chat([*opening(system), {"role": "user", "content": prompt}])
