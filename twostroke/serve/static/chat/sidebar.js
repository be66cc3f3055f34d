// The list of conversations. In a narrow window it is a drawer that a button opens.
import {byId, el} from "../shared/dom.js";

const NARROW = matchMedia("(max-width: 760px)");

export class Sidebar {
  constructor(onChoose) {
    this.onChoose = onChoose;
    this.element = byId("sidebar");
    this.button = byId("menu");
    this.button.addEventListener("click", () => this.toggle(this.element.inert));
    this.element.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && NARROW.matches) this.toggle(false, true);
    });
    NARROW.addEventListener("change", () => this.toggle(!NARROW.matches));
    this.toggle(!NARROW.matches);
  }

  // In a wide window the list is always open.
  toggle(open, focusButton = false) {
    const shown = open || !NARROW.matches;
    this.element.inert = !shown;
    this.element.classList.toggle("open", shown);
    this.button.setAttribute("aria-expanded", shown);
    if (open && NARROW.matches) byId("new").focus();
    if (focusButton) this.button.focus();
  }

  closeIfDrawer() {
    if (NARROW.matches) this.toggle(false);
  }

  show(heads, current) {
    byId("conversations").replaceChildren(...heads.map((head) => el("li", {},
      el("button", {
        type: "button", class: "quiet", "aria-current": head.id === current ? "true" : null,
        dataset: {conversation: head.id}, onclick: () => this.onChoose(head.id),
      }, head.title))));
  }
}
