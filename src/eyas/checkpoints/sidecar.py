"""Small JSON files beside a head's weights, with a part for greedy and a part for sampled answers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas.errors import CheckpointError

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

    def merged(self, head: Path, values: Any, *, greedy: bool) -> dict[str, Any]:
        """What the file should hold: ``values`` as one part, and the other part as it is.

        Raises:
            CheckpointError: a file of another kind.
        """
        return {"format": FORMAT, **self._stored(head), _part(greedy): values}

    def _stored(self, head: Path) -> dict[str, Any]:
        path = head / self.file
        try:
            stored = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, RecursionError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from None
        if not isinstance(stored, dict) or stored.get("format") != FORMAT:
            raise CheckpointError(f"{path} is not {self.what} of format {FORMAT}; `{self.command}` makes one")
        return stored


def _part(greedy: bool) -> str:
    return "greedy" if greedy else "sampled"
