"""The agent of a host: it turns assignments into ranks, detects their failures and publishes the host; supervisor,
standby, /metrics."""
