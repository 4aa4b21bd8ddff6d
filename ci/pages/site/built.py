"""Checks of a built site: internal links lead to pages and anchors that are there, and no page loads from elsewhere."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

#: Attributes of elements that a browser loads when it shows the page. A `link` loads by its `rel`.
_LOADED = {
    "script": "src",
    "img": "src",
    "iframe": "src",
    "source": "src",
    "video": "src",
    "audio": "src",
    "embed": "src",
    "object": "data",
    "use": "href",
}
_LOADED_LINKS = frozenset({"stylesheet", "icon", "preload", "prefetch", "preconnect", "dns-prefetch", "modulepreload"})
_STYLE_URL = re.compile(r"(?:url\(\s*|@import\s+)[\"']?((?:https?:)?//[^\"')\s]+)")


@dataclass
class _Page(HTMLParser):
    """The anchors and links of a page, and what it loads."""

    anchors: set[str] = field(default_factory=set)
    links: list[str] = field(default_factory=list)
    loads: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.anchors.update(values[name] for name in ("id", "name") if name in values)
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        if tag == "link" and _LOADED_LINKS & set(values.get("rel", "").split()):
            self.loads.append(values.get("href", ""))
        if tag in _LOADED and values.get(_LOADED[tag]):
            self.loads.append(values[_LOADED[tag]])
        self.loads += _STYLE_URL.findall(values.get("style", ""))


def problems(site: Path) -> list[str]:
    """A line for each broken link, each missing file, and each thing that is loaded from the network."""
    pages = {path: _read(path) for path in sorted(site.rglob("*.html"))}
    lines = [problem for path, page in pages.items() for problem in _of_page(site, path, page, pages)]
    for path in sorted(site.rglob("*.css")):
        lines += [
            f"{path.relative_to(site)} loads {url}: expected a file of the site"
            for url in _STYLE_URL.findall(path.read_text(encoding="utf-8"))
        ]
    return lines


def _read(path: Path) -> _Page:
    page = _Page()
    page.feed(path.read_text(encoding="utf-8"))
    return page


def _of_page(site: Path, path: Path, page: _Page, pages: dict[Path, _Page]) -> Iterator[str]:
    where = path.relative_to(site)
    for target in dict.fromkeys(page.loads):
        url = urlsplit(target)
        if url.scheme == "data":
            continue
        if url.scheme or url.netloc:
            yield f"{where} loads {target}: expected a file of the site"
        elif url.path and not _file(site, path, url.path).is_file():
            yield f"{where} loads {target}: there is no such file"
    for target in dict.fromkeys(page.links):
        url = urlsplit(target)
        # The page for addresses that do not exist is shown at any depth, so its links are absolute.
        if url.scheme or url.netloc or path.name == "404.html":
            continue
        file = _file(site, path, url.path) if url.path else path
        if not file.is_file():
            yield f"{where} links to {target}: there is no such page"
        elif url.fragment and file in pages and unquote(url.fragment) not in pages[file].anchors:
            yield f"{where} links to {target}: the page has no such anchor"


def _file(site: Path, page: Path, path: str) -> Path:
    """The file that a relative path of a page names."""
    file = (site / path.lstrip("/") if path.startswith("/") else page.parent / unquote(path)).resolve()
    return file / "index.html" if file.is_dir() else file
