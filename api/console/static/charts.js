"use strict";
/* Charts by uPlot: cost per day (stacked bars), curves (lines), shares (stacked areas). Data come as JSON, in attributes
   or by fetch; names go into the page as text only. */
const Charts = (() => {
  /* A variable's colour as a canvas takes it: what light-dark() comes to. */
  const css = (name) => {
    const probe = document.body.appendChild(document.createElement("i"));
    probe.style.color = `var(${name}, var(--other))`;
    const colour = getComputedStyle(probe).color;
    probe.remove();
    return colour;
  };
  const money = (usd) => usd === 0 ? "$0" : "$" + (usd >= 100 ? usd.toFixed(0) : usd >= 1 ? usd.toFixed(2) : usd >= 0.01 ? usd.toFixed(3) : usd.toPrecision(2));
  const short = (n) => { for (const [u, s] of [[1e9, "B"], [1e6, "M"], [1e3, "k"]]) if (Math.abs(n) >= u) return +(n / u).toPrecision(3) + s; return String(+(+n).toPrecision(4)); };
  const day = (t) => new Date(t * 1000).toLocaleDateString("en-GB", { day: "numeric", month: "short", timeZone: "UTC" });
  const clock = (t) => new Date(t * 1000).toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit", timeZone: "UTC" });
  const drawn = new Map();

  function axes(x, y) {
    const common = { stroke: css("--muted"), font: "11.5px system-ui, sans-serif", ticks: { show: false } };
    return [
      { ...common, grid: { show: false }, values: (_u, ticks) => ticks.map(x), space: 64, size: 24, gap: 4 },
      { ...common, grid: { stroke: css("--grid"), width: 1 }, values: (_u, ticks) => ticks.map(y), size: (_u, values) => 14 + 7 * Math.max(3, ...(values || []).map((v) => v.length)), space: 34 },
    ];
  }

  /* What is under the pointer. `rows(index)` gives a title and [name, value, class] lines. */
  function tip(el, rows) {
    const box = document.createElement("div");
    box.className = "tip"; box.hidden = true;
    el.append(box);
    return { hooks: { setCursor: [(u) => {
      const i = u.cursor.idx;
      if (i == null || u.cursor.left < 0) { box.hidden = true; return; }
      const [title, lines] = rows(i);
      const head = document.createElement("b"); head.textContent = title;
      box.replaceChildren(head, ...lines.map(([name, value, kind]) => {
        const p = document.createElement("p"), left = document.createElement("span"), right = document.createElement("span");
        if (kind) { const dot = document.createElement("i"); dot.className = "dot " + kind; left.append(dot); }
        left.append(name); right.textContent = value; p.append(left, right);
        return p;
      }));
      box.hidden = false;
      const x = u.cursor.left + u.bbox.left / devicePixelRatio;
      box.style.left = Math.max(0, x + 14 + box.offsetWidth > el.clientWidth ? x - box.offsetWidth - 14 : x + 14) + "px";
      box.style.top = "8px";
    }] } };
  }

  function draw(el, options, data) {
    const old = drawn.get(el);
    if (old) { old.plot.destroy(); old.watch.disconnect(); }
    el.querySelectorAll(".tip").forEach((t) => t.remove());
    const width = () => Math.max(120, el.clientWidth);
    const plugins = options.rows ? [tip(el, options.rows)] : [];
    const plot = new uPlot({ width: width(), height: options.height, padding: [8, 14, 0, 0], legend: { show: false }, plugins,
      cursor: { y: false, drag: { x: false, y: false }, points: { size: 7 } }, ...options.plot }, data, el);
    const watch = new ResizeObserver(() => { if (Math.abs(plot.width - width()) > 1) plot.setSize({ width: width(), height: options.height }); });
    watch.observe(el);
    drawn.set(el, { plot, watch });
    return plot;
  }

  function stack(series) {
    const sums = [];
    series.forEach((values, i) => sums.push(values.map((v, at) => v + (i ? sums[i - 1][at] : 0))));
    return sums;
  }

  /* {days, series: [{kind, usd}]} */
  function costBars(el, data, names) {
    const sums = stack(data.series.map((s) => s.usd));
    const order = data.series.map((_s, i) => i).reverse(); // the highest first, the others over it
    const bars = uPlot.paths.bars({ size: [0.72, 44], radius: 0.05 });
    const half = 43200;
    draw(el, {
      height: Number(el.dataset.height || 240),
      rows: (i) => [day(data.days[i]), [...data.series.map((s) => [names[s.kind] || s.kind, money(s.usd[i]), "kind-" + s.kind]).reverse(),
        ["Total", money(sums.length ? sums[sums.length - 1][i] : 0), ""]]],
      plot: {
        scales: { x: { time: true, range: (_u, lo, hi) => [lo - half, hi + half] }, y: { range: (_u, _lo, hi) => [0, (hi || 1) * 1.06] } },
        axes: axes(day, money), tzDate: (ts) => uPlot.tzDate(new Date(ts * 1e3), "UTC"),
        series: [{}, ...order.map((i) => ({ fill: css("--kind-" + data.series[i].kind), width: 0, paths: bars, points: { show: false } }))],
      },
    }, [data.days, ...order.map((i) => sums[i])]);
  }

  /* One curve: {steps, values, tokens, cost_nusd}; `axis` is steps, tokens or cost_nusd. */
  function curve(el, data, axis) {
    const scale = axis === "cost_nusd" ? 1e-9 : 1;
    const label = axis === "cost_nusd" ? money : short;
    const points = data[axis].map((x, i) => [x * scale, data.values[i], i]).sort((a, b) => a[0] - b[0]);
    const xs = points.map((p) => p[0]);
    draw(el, {
      height: 190,
      rows: (i) => { const at = points[i][2]; return ["Step " + data.steps[at].toLocaleString("en"), [["value", short(points[i][1]), ""], ["tokens", short(data.tokens[at]), ""], ["cost", money(data.cost_nusd[at] * 1e-9), ""]]]; },
      plot: {
        scales: { x: { time: false, range: (_u, lo, hi) => hi > lo ? [lo, hi] : [lo - 1, hi + 1] } },
        axes: axes(label, short),
        series: [{}, { stroke: css("--accent"), width: 1.8, spanGaps: true, points: { show: points.length < 40, size: 4, fill: css("--accent") } }],
      },
    }, [xs, points.map((p) => p[1])]);
  }

  /* The same curve of several runs: [{title, series, steps, values, tokens, cost_nusd}]; `series` gives the colour. */
  function over(el, runs, axis) {
    const scale = axis === "cost_nusd" ? 1e-9 : 1;
    const label = axis === "cost_nusd" ? money : short;
    const tables = runs.map((run) => {
      const last = new Map(); // of several points at the same place the last is drawn
      run[axis].forEach((x, i) => last.set(x * scale, run.values[i]));
      const xs = [...last.keys()].sort((a, b) => a - b);
      return [xs, xs.map((x) => last.get(x))];
    });
    const data = uPlot.join(tables);
    const near = (i, at) => { for (let j = i; j >= 0; j--) if (data[at + 1][j] != null) return data[at + 1][j]; return null; };
    draw(el, {
      height: 220,
      rows: (i) => [{ steps: "Step ", tokens: "Tokens ", cost_nusd: "" }[axis] + label(data[0][i]),
        runs.map((run, at) => [run.title, near(i, at) == null ? "–" : short(near(i, at)), "series-" + run.series])],
      plot: {
        scales: { x: { time: false, range: (_u, lo, hi) => hi > lo ? [lo, hi] : [lo - 1, hi + 1] } },
        axes: axes(label, short),
        // A browser without a GPU paints five jagged lines of one pixel seven times as fast as wider ones.
        series: [{}, ...runs.map((run, at) => ({ stroke: css("--series-" + run.series), width: 1, spanGaps: true,
          dash: [[], [7, 4], [2, 3], [10, 3, 2, 3], [4, 2]][run.series], points: { show: tables[at][0].length < 2, size: 4, fill: css("--series-" + run.series) } }))],
      },
    }, data);
  }

  /* Shares of a whole over time: {times, series: [{name, kind, values}]}, in parts of 1. */
  function shares(el, data) {
    const sums = stack(data.series.map((s) => s.values));
    const order = data.series.map((_s, i) => i).reverse();
    const percent = (v) => (v * 100).toFixed(v < 0.1 && v > 0 ? 1 : 0) + "%";
    draw(el, {
      height: Number(el.dataset.height || 200),
      rows: (i) => [clock(data.times[i]) + " UTC", data.series.map((s) => [s.name, percent(s.values[i]), "kind-" + s.kind]).reverse()],
      plot: {
        scales: { x: { time: true }, y: { range: [0, 1] } }, axes: axes(clock, percent),
        tzDate: (ts) => uPlot.tzDate(new Date(ts * 1e3), "UTC"),
        series: [{}, ...order.map((i) => ({ fill: data.series[i].kind === "own" ? css("--accent") : css("--kind-" + data.series[i].kind), width: 0, paths: uPlot.paths.stepped({ align: 1 }), points: { show: false } }))],
      },
    }, [data.times, ...order.map((i) => sums[i])]);
  }

  return { costBars, curve, over, shares };
})();
