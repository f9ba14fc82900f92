"""The differences between model types: one file for close kin, one record for each type; no torch."""
