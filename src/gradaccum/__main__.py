"""``python -m gradaccum``."""

from gradaccum.cli import main

main()
