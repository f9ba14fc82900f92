"""The demonstration model: a tiny Qwen3 checkpoint, shipped as package data, and the scripts that made it."""

from pathlib import Path

MODEL_DIR: Path = Path(__file__).resolve().parent / "model"
"""Directory with config.json, model.safetensors, tokenizer.json and the rest of a Hugging Face checkpoint."""
