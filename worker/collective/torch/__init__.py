"""Collectives over torch.distributed, and their trials."""
