"""Tokens to text with stop strings; checks of tokenizers, schemas and grammars."""
