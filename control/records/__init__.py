"""Records that outlive a process: models and stored responses."""
