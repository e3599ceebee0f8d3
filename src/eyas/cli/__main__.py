"""``python -m eyas.cli``."""

from eyas.cli import main

main()
