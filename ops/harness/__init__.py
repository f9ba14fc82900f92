"""The parts that benchmarks, chaos and client checks share: a farm, a client, models, stand-ins, figures and their
report."""
