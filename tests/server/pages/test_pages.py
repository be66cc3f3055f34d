"""The pages' files: types, caching, the policy, prefixes, and who gets the chat at `/`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.running import Running, running
from tests.tiny import tiny_llm
from twostroke.serve.pages.static import TYPES

STATIC = Path(__file__).parents[3] / "twostroke/serve/static"
BROWSER = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Running]:
    with running(tiny_llm(folder)) as server:
        yield server


def test_a_browser_gets_the_chat_and_another_client_the_list_of_routes(server: Running) -> None:
    status, headers, page = server.ask("GET", "/", headers=BROWSER)
    assert status == 200
    assert b"static/chat/main.js" in page
    assert headers["vary"] == "accept"
    status, headers, listed = server.ask("GET", "/", headers={"Accept": "*/*"})
    assert status == 200
    assert b'href="/v1/models"' in listed
    assert headers["vary"] == "accept"


def test_every_file_has_its_type_and_the_policy_and_is_sent_once(server: Running) -> None:
    sent = [path for path in STATIC.rglob("*.*") if path.suffix != ".html"]
    assert len(sent) >= 6
    for path in sent:
        address = f"/static/{path.relative_to(STATIC)}"
        status, headers, body = server.ask("GET", address)
        assert (status, body) == (200, path.read_bytes())
        assert headers["content-type"].encode() == TYPES[path.suffix[1:]]
        assert headers["cache-control"] == "no-cache"
        assert headers["x-content-type-options"] == "nosniff"
        status, again, body = server.ask("GET", address, headers={"If-None-Match": headers["etag"]})
        assert (status, body, again["etag"]) == (304, b"", headers["etag"])
        assert server.ask("GET", address, headers={"If-None-Match": '"other"'})[0] == 200


def test_the_policy_allows_no_inline_script_no_other_host_and_no_html_from_text(
    server: Running,
) -> None:
    headers = server.ask("GET", "/", headers=BROWSER)[1]
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "require-trusted-types-for 'script'" in policy
    assert not re.search(r"unsafe|http:|https:|\*", policy)


def test_the_files_name_no_other_host_and_no_absolute_path() -> None:
    for path in STATIC.rglob("*.*"):
        text = path.read_text().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"""(src|href|from|import|url)\s*[=(]?\s*["'(](https?:)?/""", text), (
            path
        )
        assert "innerHTML" not in text, path
        assert not re.search(r"<script>|<style>|\sstyle=|\son[a-z]+=\"", text), path


@pytest.mark.parametrize(
    "path",
    [
        "../app.py",
        "..%2fapp.py",
        "%2e%2e/app.py",
        "shared/../../app.py",
        "chat/index.html",
        "",
        "shared/",
    ],
)
def test_nothing_but_the_files_of_the_folder_is_sent(server: Running, path: str) -> None:
    assert server.ask("GET", f"/static/{path}")[0] == 404


def test_below_a_prefix_the_page_finds_its_files(folder: Path) -> None:
    with running(tiny_llm(folder), root_path="/deep/llm") as server:
        status, headers, _ = server.ask("GET", "/deep/llm", headers=BROWSER)
        assert (status, headers["location"]) == (308, "llm/")
        page = server.ask("GET", "/deep/llm/", headers=BROWSER)[2].decode()
        addresses = re.findall(r'(?:src|href)="([^"]+)"', page)
        assert len(addresses) >= 5
        for address in addresses:
            path = f"/deep/llm/{address.removeprefix('./')}"
            assert server.ask("GET", path, headers=BROWSER)[0] == 200, address


def test_without_pages_there_are_none_of_their_routes(folder: Path) -> None:
    with running(tiny_llm(folder), ui=False) as server:
        status, _, listed = server.ask("GET", "/", headers=BROWSER)
        assert status == 200
        assert b"<script" not in listed
        for path in ("/dash", "/dash/feed", "/learn", "/static/shared/base.css"):
            assert server.ask("GET", path, headers=BROWSER)[0] == 404
        assert server.ask("GET", "/docs")[0] == 200


def test_a_page_links_only_to_pages_that_answer_a_link(folder: Path) -> None:
    with running(tiny_llm(folder), dash=False, api_keys=("sesame",)) as server:
        status, _, page = server.ask("GET", "/", headers=BROWSER)
        assert status == 200, "the page itself needs no key"
        assert not re.search(rb'href="(dash|docs)"', page.split(b"<main")[0])
        assert server.ask("GET", "/", headers={"Accept": "*/*"})[0] == 401
