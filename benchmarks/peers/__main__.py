"""``python benchmarks/peers``: a directory run as a program is no package, so its parent is put on the path."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from peers.cli import main

sys.exit(main())
