"""`python -m rlcore`, as torchrun starts it."""

from rlcore.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
