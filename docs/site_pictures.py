"""Photographs every page of the built site at 1280 and 390 px, light and dark, and names pages that scroll sideways.

`mkdocs build --strict`, then `python docs/site_pictures.py --out FOLDER`. It needs playwright and Debian's chromium.
"""

import argparse
import functools
import http.server
import sys
import threading
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

_LOOKED_AT = "article pre > code, article :is(p, li, h1, h2, h3), article .md-typeset__scrollwrap"
CLIPPED = f"""() => [...document.querySelectorAll('{_LOOKED_AT}')]
    .filter(e => e.scrollWidth > e.clientWidth + 8)
    .filter(e => e.matches('.md-typeset__scrollwrap') || getComputedStyle(e).overflowX === 'visible')
    .map(e => e.textContent.trim().slice(0, 60))"""
"""What is wider than its place: a table that scrolls, or what cannot be scrolled."""


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


def look(page: Page, url: str, picture: Path) -> list[str]:
    """Photograph a page, and return what is wrong about it."""
    page.goto(url)
    width = page.evaluate("document.scrollingElement.scrollWidth")
    page.screenshot(path=picture, full_page=True)
    wrong = [f"{width} px wide"] if width > page.viewport_size["width"] else []
    return wrong + [f"clipped: {text!r}" for text in page.evaluate(CLIPPED)]


def main() -> int:
    """Look at all pages; the exit status says whether something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--site", type=Path, default=Path("site"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="", help="look at pages whose path has this")
    arguments = parser.parse_args()
    handler = functools.partial(_Quiet, directory=arguments.site)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    paths = sorted(
        path.relative_to(arguments.site)
        for path in arguments.site.rglob("index.html")
        if "article" in path.read_text() and arguments.only in str(path)
    )
    failed = 0
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        for scheme in ("light", "dark"):
            for width in (1280, 390):
                page = browser.new_page(color_scheme=scheme, viewport={"width": width, "height": 900})
                for path in paths:
                    name = str(path.parent).replace("/", "-").replace(".", "home")
                    picture = arguments.out / f"{name}-{width}-{scheme}.png"
                    for wrong in look(page, f"http://127.0.0.1:{server.server_port}/{path.parent}/", picture):
                        failed += 1
                        print(f"{path} at {width} px, {scheme}: {wrong}")
                page.close()
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
