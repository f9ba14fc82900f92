"""Engines that a comparison runs, each in a process."""
