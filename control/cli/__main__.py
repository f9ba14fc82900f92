"""`python -m control.cli`: the same as `furrow`."""

from control.cli import main

main()
