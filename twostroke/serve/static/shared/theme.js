// Sets the theme of a page. This is a classic script in the head, so it runs before the page is
// drawn.
(() => {
  const NAME = "twostroke-theme";
  const NEXT = {system: "light", light: "dark", dark: "system"};
  const SIGN = {system: "◐", light: "☀", dark: "☾"};

  function stored() {
    try {
      const theme = localStorage.getItem(NAME);
      return theme in NEXT ? theme : "system";
    } catch {
      return "system"; // storage is switched off
    }
  }

  function apply(theme) {
    if (theme === "system") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    for (const button of document.querySelectorAll("[data-theme-switch]")) {
      button.hidden = false;
      button.textContent = SIGN[theme];
      button.title = `Theme: ${theme}`;
      button.setAttribute("aria-label", `Theme: ${theme}. Switch to ${NEXT[theme]}.`);
    }
  }

  apply(stored());
  document.addEventListener("DOMContentLoaded", () => apply(stored()));
  document.addEventListener("click", (event) => {
    if (!event.target.closest("[data-theme-switch]")) return;
    const theme = NEXT[stored()];
    try {
      localStorage.setItem(NAME, theme);
    } catch { /* the choice lasts as long as the page */ }
    apply(theme);
  });
  addEventListener("storage", (event) => event.key === NAME && apply(stored()));
})();
