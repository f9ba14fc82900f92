"""The furrow command, a farm on one machine, benchmarks, fault injection, the demonstration model."""
