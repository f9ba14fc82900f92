"""The files of a model: found, downloaded, validated; no torch."""
