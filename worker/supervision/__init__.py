"""One host's supervisor: the parent of its agent, its ranks and its standby, so that a dead agent ends none of them."""
