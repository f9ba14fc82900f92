"""The image part of a model on a rank: pixels to rows that stand for the tokens of an image."""
