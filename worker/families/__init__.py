"""The differences between model types: one file for close kin, one record for each type; no torch.

A record (`Family`) is data with a few small functions of config.json, so that what is true of a type stands in one
place. A property that a reader needs becomes a field of the record, not a comparison of `model_type`. Subclasses were
rejected: the facts would be scattered over methods.

Defaults of configurations are read from transformers by `make pages` and kept in `defaults.json`, because a rank in C++
imports no transformers. A test compares them.
"""
