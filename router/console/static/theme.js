// The theme: light, dark, or the system's. It runs before the page is drawn, to avoid a flash.
"use strict";
(() => {
  const NAME = "baton-theme";
  const ORDER = ["system", "light", "dark"];
  const stored = () => {
    try {
      const found = localStorage.getItem(NAME);
      return ORDER.includes(found) ? found : "system";
    } catch {
      return "system"; // without storage, each page starts with the system's
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
        // without storage, as above
      }
    });
  });
})();
