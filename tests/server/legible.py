"""Checks of what a reader can see on a page: widths, cut text, contrast."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tests.server.browser import Page

WCAG = """
  const light = colour => {
    const [r, g, b] = colour.match(/[\\d.]+/g).map(Number).map(n => n / 255)
      .map(n => n <= 0.03928 ? n / 12.92 : ((n + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const below = one => {
    for (; one; one = one.parentElement) {
      const colour = getComputedStyle(one).backgroundColor;
      if (!colour.endsWith(', 0)') && colour !== 'transparent') return colour;
    }
  };
  const ratio = (a, b) => { [a, b] = [light(a), light(b)];
    return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05); };
"""


def each_look(page: Page, widths: Sequence[int], height: int = 900) -> Iterator[tuple[int, str]]:
    """Show a page in every width and both themes. Fail if it is wider than the window."""
    for scheme in ("light", "dark"):
        for width in widths:
            page.look(width, height, scheme)
            # A chart has its new width when it is drawn again.
            page.wait_for(f"document.documentElement.scrollWidth <= {width}", patience_s=20)
            yield width, scheme


def spilt_text(page: Page, selector: str) -> list[str]:
    """The elements whose text leaves its box, so that another box may cover it."""
    spilt: list[str] = page.value(
        f"""[...document.querySelectorAll({selector!r})]
        .filter(one => (one.offsetParent || one.closest('svg')) && one.clientWidth > 0)
        .filter(one => one.scrollWidth > one.clientWidth + 1).map(one => one.outerHTML)"""
    )
    return spilt


def poor_contrast(page: Page, text: str, drawn: str) -> list[tuple[str, float]]:
    """The elements with less contrast than WCAG asks for: 4.5 for text, 3 for what is drawn. A
    drawn element has its colour in `stroke`, `fill` or `backgroundColor`."""
    poor: list[tuple[str, float]] = page.value(
        f"""(() => {{ {WCAG}
  const poor = [];
  for (const one of document.querySelectorAll({text!r})) {{
    const style = getComputedStyle(one);
    const found = ratio(one.tagName === 'text' ? style.fill : style.color, below(one));
    if (found < 4.5) poor.push([one.outerHTML.slice(0, 80), found]);
  }}
  for (const one of document.querySelectorAll({drawn!r})) {{
    const style = getComputedStyle(one), isSvg = one instanceof SVGElement;
    const colour = !isSvg ? style.backgroundColor
      : style.stroke === 'none' ? style.fill : style.stroke;
    const found = ratio(colour, below(one.parentElement));
    if (found < 3) poor.push([one.outerHTML.slice(0, 80), found]);
  }}
  return poor;
}})()"""
    )
    return poor


def background(page: Page) -> str:
    return str(page.value("getComputedStyle(document.body).backgroundColor"))
