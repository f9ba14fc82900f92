"""Everything that is true of a model type: one file for close kin, one record for each type, no torch."""
