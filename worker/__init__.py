"""Agents and ranks, which own devices and run models. At its top: entries of processes, detectors, tensors. Never
imports the API."""
