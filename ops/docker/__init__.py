"""What the images run besides the `furrow` command."""
