"""The demonstration model."""

from pathlib import Path

MODEL_DIR: Path = Path(__file__).resolve().parent / "model"
"""Directory with config.json, model.safetensors, tokenizer.json and the rest of a Hugging Face checkpoint."""
MAX_NEW_TOKENS = 1024
"""Default length of an answer, in generation_config.json; the longest of the training text has some 700 tokens."""
