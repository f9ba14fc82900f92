"""Tokens to text with stop strings; checks of tokenizers, schemas and grammars.

The leader decides every end, stop strings included; the API shows and cuts text. Both must turn tokens into equal text,
and neither may import the other, so the code is here. It takes a `decode` function instead of a tokenizer, so `control`
imports no model library.
"""
