"""Tokens to text with stop strings, vocabularies, and the compilation of grammars."""
