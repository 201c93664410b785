"""Reports on runs: figures as PNG and SVG, and one page that holds them all and needs nothing else.

    series    runs as facts, series and lines, with the label and look of each
    figures   the lines drawn (by matplotlib, which is an extra)
    page      the HTML page, and everything written to files

`draw` is the whole of it: runs in, files out.
"""

from marfl.report.page import DrawnReport, draw
from marfl.report.series import without_copies

__all__ = ["DrawnReport", "draw", "without_copies"]
