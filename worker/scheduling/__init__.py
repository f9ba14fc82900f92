"""Which sequences run in a step: pure, torch-free, tested without a model."""
