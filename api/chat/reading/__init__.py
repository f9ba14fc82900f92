"""From an answer's text to reasoning, text and calls of tools: pure parsers, one file per format.

A parser takes the text as it comes, cut anywhere, and the sum of what it gives does not depend on the cuts. What it
can't read as a call stays text.
"""
