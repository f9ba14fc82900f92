"""From an answer's text to reasoning, text and calls of tools: pure parsers, one file per format.

A parser takes text cut anywhere, and its result does not depend on the cuts. Text that is no call stays text.
"""
