"""Every link and picture of the built site leads to a file, and to a place in it.

python docs/links.py build/docs
"""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """What a page links to, and the places it has."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.places = {""}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id":
                self.places.add(value or "")
            elif (name == "href" and tag in ("a", "link")) or (
                name == "src" and tag in ("img", "script")
            ):
                self.targets.append(value or "")


def broken(folder: Path) -> list[str]:
    """'page -> target' for everything that leads nowhere."""
    pages = {file.resolve(): Page(file.read_text()) for file in folder.rglob("*.html")}
    wrong = []
    for file, page in pages.items():
        for target in page.targets:
            address = urlsplit(target)
            if address.scheme or address.netloc:
                continue
            found = (
                (file.parent / unquote(address.path)).resolve()
                if address.path
                else file
            )
            place = unquote(address.fragment)
            if not found.exists() or (
                found in pages and place not in pages[found].places
            ):
                wrong.append(f"{file.relative_to(folder.resolve())} -> {target}")
    return wrong


if __name__ == "__main__":
    found = broken(Path(sys.argv[1]))
    print(*found, sep="\n", end="\n" if found else "")
    sys.exit(bool(found))
