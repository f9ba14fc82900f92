"""Records that outlive a process: models, backends, stored responses, reports of API processes."""
