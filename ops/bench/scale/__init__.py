"""The cost of scripts with large logs and queues."""
