"""The pages for people: the chat at `/`, `/learn`, and `/docs`.

`docs.py` writes the two pages without scripts: `/docs`, and the list of routes that `/` shows to a
client other than a browser. `openapi.py` describes the routes for `/docs` and `/openapi.json`.
`static.py` serves the other pages, which are files of `serve/static`:

    static/shared/   base.css (design tokens, plain elements), theme.js, dom.js, api.js, key.js
    static/chat/     the page at `/`
    static/learn/    the page at `/learn`

To add a page, put `index.html` into a folder of its own and name the folder in `static.PAGES`.
The rules for these files:

- A page needs no build step and loads nothing from another host. The Content-Security-Policy allows
  scripts, styles and images of this server only: no inline script, no `style=` attribute (set
  `element.style` from a script), no `eval`, and no `innerHTML` (`require-trusted-types-for`).
- A page contains no data and needs no API key. It reads its data from documented routes with
  `api.js`, which sends the key, and asks the user for a key when the server answers 401.
- Every address is relative, because a proxy or `--root-path` may add a prefix. In HTML, write
  `static/shared/base.css` and `learn`: every page is directly below the root. In a module, write
  `address("v1/models")`, with `address` from `api.js`.
- `<!-- nav -->` in a page's HTML is replaced with the links to the pages that the server has, and
  the button that switches between light and dark.
- Every page links `static/shared/base.css` and `static/shared/theme.js` (a classic script in the
  head, so that a page never flashes in the other theme).
- A file is read once, at the start of the server, and sent with an ETag. A browser asks each time
  whether the file has changed, and gets 304 if it has not.

`--no-ui` leaves out all pages and their files, `/dash` among them; `/docs` stays.
"""
