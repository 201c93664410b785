"""Reports on runs: figures as PNG and SVG, and one page that holds them all and needs nothing else."""

from marfl.report.draw import Report, draw

__all__ = ["Report", "draw"]
