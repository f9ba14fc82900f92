"""All that loading and computing a model type takes: one file for close kin, one record for each type, no torch."""
