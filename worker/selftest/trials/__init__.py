"""The trials: each computes something by a kernel and the same by plain torch in float64."""
