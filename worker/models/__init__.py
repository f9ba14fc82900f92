"""Everything that touches a model's files and transformers' internals.

`families`, `files`, `gates` and `source` are free of torch: they are read before any rank process exists.
"""
