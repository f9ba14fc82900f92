"""Tokens to text, vocabularies, and the compilation of grammars."""
