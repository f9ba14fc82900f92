"""`python -m ops.cli`: the same as `furrow`."""

from ops.cli import main

main()
