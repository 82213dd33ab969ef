"use strict";
/* What pages do beside htmx: menu, colours, messages, charts, and a run's live numbers. */
(() => {
  const $ = (selector, root = document) => root.querySelector(selector);
  const $$ = (selector, root = document) => [...root.querySelectorAll(selector)];

  /* ---- a button does it once: not again by a double click, nor while what it asked for is under way */
  document.addEventListener("click", (event) => {
    if (event.detail > 1 && event.target.closest("form[hx-post] button, button[hx-post]")) { event.preventDefault(); event.stopPropagation(); }
  }, true);
  document.body.addEventListener("htmx:confirm", (event) => {
    if (event.detail.verb !== "get" && event.detail.elt.classList.contains("htmx-request")) event.preventDefault();
  });

  /* ---- messages */
  const toast = $("#toast");
  let hiding = 0;
  function tell(text, bad) {
    toast.textContent = text;
    toast.className = bad ? "shown bad" : "shown";
    clearTimeout(hiding);
    hiding = setTimeout(() => { toast.className = ""; }, bad ? 9000 : 3500);
  }
  document.body.addEventListener("htmx:responseError", (event) => {
    const { status, responseText } = event.detail.xhr;
    const ours = status < 500 || /^text\/plain/.test(event.detail.xhr.getResponseHeader("content-type")); // a proxy's is a page
    tell(ours && responseText.length < 600 ? responseText : "That did not work (" + status + "). Try again.", true);
  });
  document.body.addEventListener("htmx:sendError", () => tell("The server cannot be reached.", true));
  const stops = () => $$("a[href], button, input, select, textarea", $("#main")).filter((one) => one.getClientRects().length);
  document.body.addEventListener("htmx:beforeOnLoad", (event) => { // said once the page is there again
    const { xhr } = event.detail;
    if (xhr.status >= 300 || xhr.getResponseHeader("hx-refresh") !== "true") return;
    sessionStorage.setItem("weft-said", xhr.responseText);
    sessionStorage.setItem("weft-place", String(stops().findIndex((one) => one.matches(":focus-visible"))));
  });
  document.body.addEventListener("htmx:afterSwap", (event) => { const seen = $("[data-focus]", event.detail.target); if (seen) { seen.focus(); seen.scrollIntoView({ block: "nearest" }); } });
  document.body.addEventListener("htmx:afterRequest", (event) => { if (event.detail.successful && event.detail.elt.matches("[data-resets]")) event.detail.elt.reset(); });
  const said = sessionStorage.getItem("weft-said");
  if (said) { sessionStorage.removeItem("weft-said"); tell(said); stops()[sessionStorage.getItem("weft-place")]?.focus(); } // who works by keyboard goes on from their place

  /* ---- menu on small screens */
  const menu = $("#menu");
  function unfold(open) {
    $("#side").classList.toggle("open", open);
    menu.setAttribute("aria-expanded", String(open));
    if (open) $("#side li a").focus();
  }
  if (menu) menu.addEventListener("click", () => unfold(!$("#side").classList.contains("open")));
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && $("#side.open") && !$("dialog[open]")) { unfold(false); menu.focus(); }
  });

  /* ---- colours */
  const themes = ["auto", "light", "dark"];
  const button = $("[data-theme-next]");
  function showTheme(theme) {
    if (theme === "auto") delete document.documentElement.dataset.theme; else document.documentElement.dataset.theme = theme;
    if (!button) return;
    button.lastElementChild.textContent = { auto: "Auto", light: "Light", dark: "Dark" }[theme];
    button.setAttribute("aria-label", "Colours: " + { auto: "as the system", light: "light", dark: "dark" }[theme]);
    drawAll();
  }
  const chosen = () => localStorage.getItem("weft-theme") || "auto";
  if (button) button.addEventListener("click", () => {
    const next = themes[(themes.indexOf(chosen()) + 1) % themes.length];
    if (next === "auto") localStorage.removeItem("weft-theme"); else localStorage.setItem("weft-theme", next);
    showTheme(next);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawAll());

  /* ---- copying and forms */
  document.body.addEventListener("click", (event) => {
    const copy = event.target.closest("[data-copy]");
    if (copy) navigator.clipboard.writeText($(copy.dataset.copy).textContent).then(() => tell("Copied"), () => tell("Copying is not allowed here", true));
  });
  document.body.addEventListener("change", (event) => {
    if (event.target.matches("[data-submits]")) event.target.form.requestSubmit();
  });
  $$("form.filters").forEach((form) => form.addEventListener("submit", () => {
    $$("input, select", form).forEach((field) => { if (!field.value) field.disabled = true; });
  }));

  /* ---- tables on small screens: each row is a card whose lines say their column (console.css) */
  function label(root) {
    for (const table of $$("table", root)) {
      const heads = $$("thead th", table).map((th) => th.textContent.trim());
      for (const row of $$("tbody tr, tfoot tr", table)) [...row.cells].forEach((cell, i) => { cell.dataset.label = heads[i] || ""; });
    }
  }
  document.body.addEventListener("htmx:afterSettle", () => label(document));
  label(document);

  /* ---- choosing runs to compare; the list is loaded again every few seconds, and what is chosen stays */
  const chosenRuns = new Set();
  function choose() {
    const form = $("form.choose");
    if (!form) return;
    const boxes = $$("input[type=checkbox][name=run]").filter((box) => box.form === form);
    for (const box of boxes) if (chosenRuns.has(box.value)) box.checked = true;
    const count = boxes.filter((box) => box.checked).length, most = Number(form.dataset.most);
    for (const box of boxes) box.disabled = !box.checked && count >= most;
    $("button", form).disabled = count < 2;
  }
  document.body.addEventListener("change", (event) => {
    if (!event.target.matches("input[name=run]")) return;
    if (event.target.checked) chosenRuns.add(event.target.value); else chosenRuns.delete(event.target.value);
    choose();
  });
  document.body.addEventListener("htmx:afterSettle", choose);
  $$("input[name=run]:checked").forEach((box) => chosenRuns.add(box.value));
  choose();

  /* ---- charts */
  function drawAll() {
    const names = JSON.parse(document.body.dataset.kinds || "{}");
    $$("[data-cost]").forEach((el) => Charts.costBars(el, JSON.parse(el.dataset.cost), names));
    $$("[data-shares]").forEach((el) => Charts.shares(el, JSON.parse(el.dataset.shares)));
    drawCurves();
    drawCompared();
  }

  /* ---- data that pages ask for. What fails is asked for again after a second, then after twice as long each time */
  const after = async (pause) => { // while nobody sees the page, it asks nothing
    await new Promise((go) => setTimeout(go, pause));
    if (document.visibilityState === "hidden") await new Promise((go) => document.addEventListener("visibilitychange", go, { once: true }));
  };
  async function asked(url) {
    const behind = $("#behind");
    for (let pause = 1000; ; pause = Math.min(2 * pause, 30000)) {
      let why = "The server cannot be reached.";
      try {
        const answer = await fetch(url, { headers: { accept: "application/json" } });
        if (answer.ok) { const text = await answer.text(); behind.hidden = true; return text; }
        if (answer.status === 401) { location.reload(); return new Promise(() => {}); }
        why = "The server answered " + answer.status + ".";
      } catch { /* `why` says it */ }
      behind.textContent = why + " What you see is not up to date; the page goes on asking.";
      behind.hidden = false;
      await after(pause);
    }
  }

  /* ---- a run */
  const run = $("[data-run]");
  let live = null, axis = "steps";
  function byKind(a, b) {
    const place = (name) => /reward/.test(name) ? 0 : /loss/.test(name) ? 1 : 2;
    return place(a) - place(b) || a.localeCompare(b);
  }
  function curveCard(box, name) {
    let card = $$(".card", box).find((c) => c.dataset.curve === name);
    if (!card) {
      card = $("#curve").content.firstElementChild.cloneNode(true);
      card.dataset.curve = name;
      $("h2", card).textContent = name;
      $(".chart", card).setAttribute("aria-label", "Curve of " + name);
      box.append(card);
    }
    return card;
  }
  function drawCurves() {
    if (!run || !live) return;
    const box = $("#curves");
    const curves = [...live.curves].sort((a, b) => byKind(a.name, b.name));
    $("#no-curves").hidden = curves.length > 0;
    $("#axis").hidden = curves.length === 0;
    for (const data of curves) {
      const card = curveCard(box, data.name);
      $(".latest", card).textContent = String(+data.values[data.values.length - 1].toPrecision(4));
      $(".at", card).textContent = "step " + data.steps[data.steps.length - 1].toLocaleString("en");
      Charts.curve($(".chart", card), data, axis);
    }
    box.setAttribute("aria-busy", "false");
  }
  async function refresh() {
    const text = await asked(run.dataset.run);
    if (text !== refresh.last) {
      refresh.last = text;
      live = JSON.parse(text);
      const cost = $("#cost data");
      cost.value = live.cost_usd; cost.title = "$" + live.cost_usd; cost.textContent = live.cost_text;
      $("#tokens").textContent = live.tokens.toLocaleString("en");
      $("#optim-steps").textContent = live.optim_steps.toLocaleString("en");
      const state = $("#state .state");
      state.textContent = live.state; state.className = "state " + live.state;
      drawCurves();
    }
    await after(live.state === "closed" ? 15000 : 3000);
    refresh();
  }
  /* ---- runs over each other */
  const comparing = $("[data-compare]");
  let compared = null;
  function drawCompared() {
    if (!comparing || !compared) return;
    const box = $("#curves");
    const names = [...new Set(compared.flatMap((run) => run.curves.map((curve) => curve.name)))].sort(byKind);
    for (const name of names) {
      const runs = compared.flatMap((run, i) => run.curves.filter((curve) => curve.name === name).map((curve) => ({ ...curve, title: titles[i], series: i })));
      Charts.over($(".chart", curveCard(box, name)), runs, axis);
    }
    box.setAttribute("aria-busy", "false");
  }
  const titles = $$("[data-series]").map((el) => el.textContent.trim());
  async function compare() {
    compared = JSON.parse(await asked(comparing.dataset.compare)).runs;
    drawCompared();
  }
  if (comparing && $("#curves")) compare();

  if (run || comparing) {
    $$("#axis button").forEach((choice) => choice.addEventListener("click", () => {
      axis = choice.dataset.axis;
      $$("#axis button").forEach((b) => b.setAttribute("aria-pressed", String(b === choice)));
      drawCurves();
      drawCompared();
    }));
  }
  if (run) refresh();

  showTheme(chosen());
})();
