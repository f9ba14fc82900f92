"""Verbs that show the state of the farm."""
