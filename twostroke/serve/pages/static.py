"""`StaticPages`: the pages made of files, and the stylesheets and modules that they load."""

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
ROOT_SUMMARY = "A chat with the model. Other clients than browsers get a list of routes."
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
    (b"cache-control", b"no-cache"),  # ask each time whether the file is still the same
)


@dataclass(frozen=True, slots=True)
class StaticFile:
    content: bytes
    etag: bytes
    headers: Headers

    @classmethod
    def of(cls, content: bytes, ending: str) -> StaticFile:
        etag = b'"%b"' % sha256(content).hexdigest()[:32].encode()
        headers = ((b"content-type", TYPES[ending]), (b"etag", etag), *SAFE)
        return cls(content, etag, headers)

    async def send(self, http: HttpRequest, more: Headers = ()) -> None:
        known = (http.header(b"if-none-match") or b"").split(b",")
        same = any(one.strip().removeprefix(b"W/") in (self.etag, b"*") for one in known)
        if same:
            await http.respond(304, b"", (*self.headers, *more))
        else:
            await http.respond(200, self.content, (*self.headers, *more))


class StaticPages:
    """`linked`: the paths of other pages to link to. The files are read once; a request names one
    of them or is answered 404, so no path leads out of the folder."""

    def __init__(self, linked: Sequence[str]) -> None:
        folder = files("twostroke.serve").joinpath("static")
        found = dict(_files(folder))
        have = {path for path, name in PAGES.items() if f"{name}/index.html" in found}
        shown = [path for path in TITLES if path in have or path in linked]
        self._pages = {
            path: _page(path, found[f"{PAGES[path]}/index.html"], shown) for path in sorted(have)
        }
        self._files: Mapping[str, StaticFile] = {
            name: StaticFile.of(content, name.rpartition(".")[2])
            for name, content in found.items()
            if not name.endswith(".html")
        }

    def routes(self) -> list[Route]:
        """All but `/`, which has another answer for clients that are no browsers."""
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
    """Whether the client is a browser that opens a page."""
    return b"text/html" in (http.header(b"accept") or b"")


def _files(folder: Traversable, prefix: str = "") -> Iterator[tuple[str, bytes]]:
    for one in folder.iterdir():
        if one.is_dir():
            yield from _files(one, f"{prefix}{one.name}/")
        elif one.name.rpartition(".")[2] in TYPES:
            yield prefix + one.name, one.read_bytes()


def _page(path: str, html: bytes, linked: Sequence[str]) -> StaticFile:
    """The page with its links to the others. `./` is the root for a page that lies below it."""
    links = "".join(
        f'<a href="{escape(one[1:] or "./")}"{_current(one, path)}>{escape(TITLES[one])}</a>'
        for one in linked
    )
    button = '<button type="button" data-theme-switch hidden></button>'
    nav = f'<nav class="pages" aria-label="Pages">{links}{button}</nav>'
    return StaticFile.of(html.replace(NAV.encode(), nav.encode()), "html")


def _current(one: str, path: str) -> str:
    return ' aria-current="page"' if one == path else ""
