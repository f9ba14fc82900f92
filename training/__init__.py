"""Training of the demonstration model. It runs from a checkout and is in no wheel, image or version hash of a build.

It needs torch and transformers, and no user runs it. It may import `ops.demo`, and nothing imports it. Its tests are
those of the model (tests/unit/ops/demo), because the tests of quantization measure the model on its held-out questions.
"""
