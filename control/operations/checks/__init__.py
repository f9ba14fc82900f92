"""Judgement of a farm by facts, with a remedy for each finding: for `furrow doctor`, the HTTP API and the console."""
