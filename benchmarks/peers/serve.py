"""The worker: ``python -m peers.serve ENGINE``, run by ``peers.worker`` in an engine's own environment."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from peers.protocol import Engine, private_stdout, serve


def main() -> None:
    """Serve the engine named on the command line."""
    out = private_stdout()

    def load(settings: dict[str, Any]) -> Engine:
        engine: Engine = importlib.import_module(f"peers.engines.{sys.argv[1]}").load(settings)
        return engine

    serve(load, sys.stdin, out)


if __name__ == "__main__":
    main()
