"""Figures, goals, tables and the chart of a comparison."""
