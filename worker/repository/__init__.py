"""The files of a model on disk: found, downloaded, validated before any process starts; tokenizers of GGUF files; no
torch."""
