"""The step: what a command makes of the running batch, the forward, and the tokens that every rank agrees on."""
