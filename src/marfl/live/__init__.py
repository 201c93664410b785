"""A run as one page in a browser, while it runs or afterwards.

    scene     what the page shows, as plain values: from a run directory, or from what peers say of themselves
    web       a server on loopback that answers GET for a few fixed paths, and takes no input
    page.html the page itself: it holds everything, loads nothing from elsewhere, and asks only where it came from
"""

from marfl.live.scene import Iteration, Scene, scene_of_peer, scene_of_run
from marfl.live.web import Page, read_page, serve_pages

__all__ = ["Iteration", "Page", "Scene", "read_page", "scene_of_peer", "scene_of_run", "serve_pages"]
