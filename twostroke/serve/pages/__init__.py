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
- A page holds no data and answers without an API key. What it shows, it asks of documented routes
  with `api.js`, which adds the key and asks for one when the server answers 401.
- Every address is relative, since a proxy or `--root-path` may put a prefix before it. In HTML,
  write `static/shared/base.css` and `learn`: a page lies directly below the root. In a module, use
  `api.js`'s `address("v1/models")`.
- `<!-- nav -->` in a page's HTML is replaced with the links to the pages that the server has, and
  the button that switches between light and dark.
- Every page links `static/shared/base.css` and `static/shared/theme.js` (a classic script in the
  head, so that a page never flashes in the other theme).
- A file is read once, at the server's start, and is sent with an ETag: a browser asks each time and
  is answered 304 as long as the file is the same.

`--no-ui` leaves out all pages and their files, `/dash` among them; `/docs` stays.
"""
