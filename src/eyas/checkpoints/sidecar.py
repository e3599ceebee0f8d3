"""Small JSON files beside a head's weights, with a part for greedy and a part for sampled answers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas.checkpoints.hf import read_json
from eyas.errors import CheckpointError, InvalidInputError
from eyas.files import replace_file

FORMAT = 1


@dataclass(frozen=True)
class Sidecar:
    """``{"format": 1, "greedy": ..., "sampled": ...}``; each of the two parts may be missing.

    Attributes:
        file: its name.
        what: what it is, with an article.
        command: what makes it.
    """

    file: str
    what: str
    command: str

    def read(self, head: Path, *, greedy: bool) -> Any:
        """A part of the file in directory ``head``; None where there is none.

        Raises:
            CheckpointError: a file of another kind.
        """
        return self._stored(head).get(_part(greedy))

    def write(self, head: Path, values: Any, *, greedy: bool) -> None:
        """Store ``values`` as one part; the other part stays. The file is replaced in one step.

        Raises:
            CheckpointError: a file of another kind.
            InvalidInputError: the directory cannot be written to.
        """
        content = {"format": FORMAT, **self._stored(head), _part(greedy): values}
        try:
            replace_file(head / self.file, [json.dumps(content, allow_nan=False).encode() + b"\n"])
        except OSError as error:
            raise InvalidInputError(f"cannot write {head / self.file}: {error.strerror}") from None

    def remove(self, head: Path) -> None:
        """Delete the file in directory ``head``, if there is one: it speaks of weights that were there before."""
        (head / self.file).unlink(missing_ok=True)

    def _stored(self, head: Path) -> dict[str, Any]:
        path = head / self.file
        if not path.exists():
            return {}
        stored = read_json(path)
        if stored.get("format") != FORMAT:
            raise CheckpointError(f"{path} is not {self.what} of format {FORMAT}; `{self.command}` makes one")
        return stored


def _part(greedy: bool) -> str:
    return "greedy" if greedy else "sampled"
