"""The `furrow` command, a farm on one machine, benchmarks, fault injection. At its top: Prometheus and Grafana
files."""
