// Light, dark, or as the system has it; before the page is drawn, so that it does not flash.
"use strict";
(() => {
  const NAME = "baton-theme";
  const ORDER = ["system", "light", "dark"];
  const stored = () => {
    try {
      const found = localStorage.getItem(NAME);
      return ORDER.includes(found) ? found : "system";
    } catch {
      return "system"; // no storage: it is chosen anew for each page
    }
  };
  const show = (theme) => {
    if (theme === "system") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
  };
  let theme = stored();
  show(theme);
  document.addEventListener("DOMContentLoaded", () => {
    const button = document.getElementById("theme");
    const name = () => (button.textContent = `Theme: ${theme}`);
    name();
    button.addEventListener("click", () => {
      theme = ORDER[(ORDER.indexOf(theme) + 1) % ORDER.length];
      show(theme);
      name();
      try {
        localStorage.setItem(NAME, theme);
      } catch {
        // no storage: see above
      }
    });
  });
})();
