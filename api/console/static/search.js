"use strict";
/* Search by Ctrl-K: a dialog whose list comes from the server as one types; arrows and Enter choose, Escape closes. */
(() => {
  const box = document.getElementById("search-box");
  if (!box) return;
  const text = document.getElementById("search-text"), found = document.getElementById("found");
  const hits = () => [...found.querySelectorAll("[role=option]")];
  let at = 0;

  function mark(place) {
    const all = hits();
    at = all.length ? (place + all.length) % all.length : 0;
    all.forEach((hit, i) => hit.setAttribute("aria-selected", String(i === at)));
    if (all[at]) { text.setAttribute("aria-activedescendant", all[at].id); all[at].scrollIntoView({ block: "nearest" }); }
    else text.removeAttribute("aria-activedescendant");
  }
  function open() {
    if (box.open) return;
    box.showModal();
    text.select();
    htmx.trigger(text, "ask");
  }

  document.addEventListener("keydown", (event) => {
    if ((event.ctrlKey || event.metaKey) && !event.altKey && event.key.toLowerCase() === "k") { event.preventDefault(); open(); }
  });
  document.querySelectorAll("[data-search]").forEach((button) => button.addEventListener("click", open));
  text.addEventListener("keydown", (event) => {
    if (event.key === "Escape") { event.preventDefault(); box.close(); } // a browser would clear the field first
    if (event.key === "ArrowDown" || event.key === "ArrowUp") { event.preventDefault(); mark(at + (event.key === "ArrowDown" ? 1 : -1)); }
    if (event.key === "Enter") { event.preventDefault(); const hit = hits()[at]; if (hit) hit.click(); }
  });
  found.addEventListener("htmx:afterSwap", () => mark(0));
  found.addEventListener("click", () => box.close()); // the page may be the one that is open
  box.addEventListener("click", (event) => { if (event.target === box) box.close(); });
})();
