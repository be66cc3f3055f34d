"""`StaticPages`: pages that are files, with their stylesheets and modules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from html import escape
from importlib.resources import files
from importlib.resources.abc import Traversable

from twostroke.serve.error_responses import ApiError
from twostroke.serve.http.http_request import Headers, HttpRequest
from twostroke.serve.http.routing import Route

PAGES = {"/": "chat", "/learn": "learn"}  # the folder of each page's index.html
SUMMARIES = {"/learn": "A page that explains prefill and decode with this engine."}
ROOT_SUMMARY = "A chat with the model. Clients other than browsers get a list of routes."
TITLES = {"/": "Chat", "/learn": "Learn", "/dash": "Dashboard", "/docs": "API"}
TYPES = {
    "html": b"text/html; charset=utf-8",
    "css": b"text/css; charset=utf-8",
    "js": b"text/javascript; charset=utf-8",
    "svg": b"image/svg+xml",
    "json": b"application/json",
}
NAV = "<!-- nav -->"
POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
    b"connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    b"require-trusted-types-for 'script'; trusted-types 'none'"
)
SAFE: Headers = (
    (b"content-security-policy", POLICY),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-cache"),  # the browser asks each time whether the file has changed
)


@dataclass(frozen=True, slots=True)
class StaticFile:
    content: bytes
    etag: bytes
    headers: Headers

    @classmethod
    def from_content(cls, content: bytes, ending: str) -> StaticFile:
        etag = b'"%b"' % sha256(content).hexdigest()[:32].encode()
        headers = ((b"content-type", TYPES[ending]), (b"etag", etag), *SAFE)
        return cls(content, etag, headers)

    async def send(self, http: HttpRequest, more: Headers = ()) -> None:
        known = (http.header(b"if-none-match") or b"").split(b",")
        unchanged = any(etag.strip().removeprefix(b"W/") in (self.etag, b"*") for etag in known)
        if unchanged:
            await http.respond(304, b"", (*self.headers, *more))
        else:
            await http.respond(200, self.content, (*self.headers, *more))


class StaticPages:
    """The static pages. `linked`: the paths of other pages to link to.

    The files are read once, at the start. Any other name gets 404, so no path can leave the
    folder."""

    def __init__(self, linked: Sequence[str]) -> None:
        folder = files("twostroke.serve").joinpath("static")
        found = dict(_files(folder))
        pages = {path for path, name in PAGES.items() if f"{name}/index.html" in found}
        shown = [path for path in TITLES if path in pages or path in linked]
        self._pages = {
            path: _page(path, found[f"{PAGES[path]}/index.html"], shown) for path in sorted(pages)
        }
        self._files: Mapping[str, StaticFile] = {
            name: StaticFile.from_content(content, name.rpartition(".")[2])
            for name, content in found.items()
            if not name.endswith(".html")
        }

    def routes(self) -> list[Route]:
        """Return the routes of all pages and files, except `/`, which `App` serves."""
        summary = "Stylesheets and modules of the pages."
        pages = [path for path in self._pages if path != "/"]
        return [
            *(Route("GET", path, self.page, SUMMARIES[path], open=True) for path in pages),
            Route("GET", "/static/{file...}", self.file, summary, open=True),
        ]

    async def page(self, http: HttpRequest) -> None:
        await self._pages[http.path].send(http, ((b"vary", b"accept"),))

    async def file(self, http: HttpRequest) -> None:
        file = self._files.get(http.path_params["file"])
        if file is None:
            raise ApiError(404, f"there is no {http.path[:200]!r} here", code="not_found")
        await file.send(http)


def wants_page(http: HttpRequest) -> bool:
    """Return whether the client is a browser that opens a page."""
    return b"text/html" in (http.header(b"accept") or b"")


def _files(folder: Traversable, prefix: str = "") -> Iterator[tuple[str, bytes]]:
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from _files(entry, f"{prefix}{entry.name}/")
        elif entry.name.rpartition(".")[2] in TYPES:
            yield prefix + entry.name, entry.read_bytes()


def _page(path: str, html: bytes, linked: Sequence[str]) -> StaticFile:
    """Return a page with links to the other pages. Pages are below the root, which is `./`."""
    links = "".join(
        f'<a href="{escape(link[1:] or "./")}"{_current(link, path)}>{escape(TITLES[link])}</a>'
        for link in linked
    )
    button = '<button type="button" data-theme-switch hidden></button>'
    nav = f'<nav class="pages" aria-label="Pages">{links}{button}</nav>'
    return StaticFile.from_content(html.replace(NAV.encode(), nav.encode()), "html")


def _current(link: str, path: str) -> str:
    return ' aria-current="page"' if link == path else ""
