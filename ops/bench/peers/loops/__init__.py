"""Engines driven in a process of their own: each module has `load(setup)`, whose result has `run(prompts, tokens)`."""
