"""Facts about this host, gathered beside the agent's loop and published for `furrow doctor`."""
