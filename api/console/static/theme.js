"use strict";
/* Colours before the page is drawn: as the system has them, unless somebody has chosen. */
(() => {
  const chosen = localStorage.getItem("weft-theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
})();
