"use strict";
// Draws the page's charts, in the colours of the theme and over the axis that the reader chose.
const lockstep = (() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const heat = {
    light: [[0, "#dfe9f3"], [0.35, "#a9c6e2"], [0.7, "#4d82bb"], [1, "#173f74"]],
    dark: [[0, "#22344c"], [0.35, "#2d5380"], [0.7, "#5f9bdd"], [1, "#dbe9fa"]],
  };
  const axisTitles = { step: "step", epoch: "epoch", wall: "minutes:seconds" };
  const oneRow = 29;  // pixels that a legend of one row is high
  let axis = "step";

  const isDark = () => document.documentElement.dataset.theme === "dark";
  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  // Names of colours stand only where colours do, so that no text of a run is ever taken for one.
  function paint(value, key) {
    if (Array.isArray(value)) return value.map((one) => (typeof one === "string" ? paint(one, key) : paint(one, "")));
    if (value && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([name, one]) => [name, paint(one, name)]));
    }
    if (typeof value !== "string" || !value.startsWith("--")) return value;
    if (key === "colorscale") return heat[isDark() ? "dark" : "light"];
    return key === "color" ? color(value) : value;
  }

  function clock(seconds) {
    const whole = Math.round(seconds), two = (n) => String(n).padStart(2, "0");
    const hours = Math.floor(whole / 3600), minutes = Math.floor(whole / 60) % 60;
    return hours ? `${hours}:${two(minutes)}:${two(whole % 60)}` : `${minutes}:${two(whole % 60)}`;
  }

  // Round numbers of minutes and seconds, which plotly's own ticks are not.
  function clockTicks(last) {
    const sizes = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400];
    const size = sizes.find((one) => last / one <= 6) || Math.ceil(last / 6 / 86400) * 86400;
    const values = [];
    for (let at = 0; at <= last && values.length < 20; at += size) values.push(at);
    return { tickvals: values, ticktext: values.map(clock) };
  }

  function figure(chart, width) {
    const isCurve = chart.traces.some((trace) => trace.at);
    const traces = chart.traces.map((trace) => {
      const { at, heights, ...rest } = trace;
      return paint(at ? { ...rest, x: at[axis], ...(heights && { y: heights[axis] }) } : rest, "");
    });
    const ink = color("--ink"), muted = color("--muted"), grid = color("--grid");
    const line = { gridcolor: grid, zeroline: false, linecolor: color("--rule"), automargin: true, ticks: "",
      exponentformat: "power", minexponent: 6, separatethousands: true,
      tickfont: { color: muted, size: 12 }, title: { font: { color: muted, size: 12 }, standoff: 8 } };
    const named = painted(chart.layout);
    const layout = {
      ...named,
      autosize: true, height: chart.height, margin: { l: 8, r: 10, t: 12, b: 8 },
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: getComputedStyle(document.body).fontFamily, color: ink, size: 12 },
      // As high as its rows are: a legend that scrolls hides names.
      legend: { orientation: "h", x: 0, y: 1, yanchor: "bottom", font: { color: muted, size: 12 },
        bgcolor: "rgba(0,0,0,0)", traceorder: "normal", maxheight: 9999 },
      hoverlabel: { bgcolor: color("--paper"), bordercolor: color("--rule"), font: { color: ink } },
      hovermode: isCurve && chart.traces.every((trace) => trace.type === "scatter") ? "x unified" : "closest",
      dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom",
      xaxis: merge(line, named.xaxis), yaxis: merge(line, named.yaxis),
    };
    layout.yaxis.fixedrange = true;
    // Names that have no room would lie over each other; hovering tells them.
    const names = (named.xaxis || {}).ticktext;
    if (names && width / names.length < 28) layout.xaxis.showticklabels = false;
    let first = Infinity, last = -Infinity;
    if (isCurve) {
      layout.xaxis.title = { ...line.title, text: axisTitles[axis] };
      layout.xaxis.hoverformat = axis === "step" ? ",d" : ".4~g";
      if (axis === "step") layout.xaxis.tickformat = ",d";
      chart.traces.forEach((trace) => trace.at && trace.at[axis].forEach((x) => {
        if (x !== null) { first = Math.min(first, x); last = Math.max(last, x); }
      }));
      if (axis === "wall") Object.assign(layout.xaxis, clockTicks(last));
      if (axis === "wall" && last >= 3600) layout.xaxis.title.text = "hours:minutes:seconds";
      if (axis === "step" && last - first <= 10) layout.xaxis.dtick = 1;  // or there would be halves of steps
      const room = (last - first) * 0.02;
      if (last > first && traces[0].type === "scatter") layout.xaxis.range = [first - room, last + room];
    }
    // What came before all that is drawn is no mark in it; beside the axis its text lies inside, off the ticks' labels.
    const lines = chart.marks.filter((mark) => mark.at[axis] !== null && mark.at[axis] >= first);
    const isFirst = (x) => x - first < (last - first) * 0.08;
    layout.shapes = (named.shapes || []).concat(lines.map((mark) => ({ type: "line", yref: "paper", y0: 0, y1: 1,
      x0: mark.at[axis], x1: mark.at[axis], line: { color: muted, width: 1, dash: "dot" } })));
    layout.annotations = (named.annotations || []).concat(lines.slice(-8).map((mark) => ({ x: mark.at[axis], y: 0,
      yref: "paper", yanchor: "bottom", xanchor: isFirst(mark.at[axis]) ? "left" : "right", textangle: -90,
      showarrow: false, text: mark.text, font: { color: muted, size: 11 } })));
    const legends = traces.filter((trace) => trace.showlegend !== false && trace.type !== "heatmap").length;
    layout.showlegend = legends > 1;
    return [traces, layout];
  }

  const painted = (layout) => paint(layout || {}, "");
  const merge = (base, own) => ({ ...base, ...(own || {}), title: { ...base.title, ...((own || {}).title || {}) } });

  // How much higher a legend is than one row; how its names wrap is known only when they are drawn.
  function measureRows(place) {
    const legend = place.querySelector(".legend .bg");
    return legend ? Math.max(0, Math.round(legend.getBoundingClientRect().height) - oneRow) : 0;
  }

  async function draw(chart) {
    const place = document.getElementById(`chart-${chart.name}`);
    if (!place) return;
    const [traces, layout] = figure(chart, place.clientWidth);
    // Rows of the legend must not be taken from the drawing; those of the last time are mostly those of this one.
    let rows = -1, again = Number(place.dataset.rows || 0);
    for (let tries = 0; tries < 3 && again !== rows; tries++) {
      rows = again;
      layout.height = chart.height + rows;
      place.style.height = `${layout.height}px`;
      await Plotly.react(place, traces, { ...layout }, { displayModeBar: false });
      again = measureRows(place);
    }
    place.dataset.rows = String(rows);
    place.dataset.drawn = "yes";
  }

  let turn = 0;
  // One chart at a time, so that the page answers meanwhile; a newer wish ends an older one.
  async function drawAll(charts) {
    const mine = ++turn;
    for (const chart of charts) {
      if (mine !== turn) return;
      await draw(chart);
      await new Promise((next) => setTimeout(next));
    }
    document.documentElement.dataset.drawn = String(mine);
  }

  function setTheme(theme, isChoice) {
    document.documentElement.dataset.theme = theme;
    document.getElementById("theme").textContent = theme === "dark" ? "Light" : "Dark";
    if (isChoice) try { localStorage.setItem("lockstep-theme", theme); } catch { /* a private window keeps nothing */ }
  }

  async function load() {
    const packed = document.getElementById("plotly");
    if (!packed) return;  // a page without charts
    const bytes = Uint8Array.from(atob(packed.textContent), (one) => one.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    const script = document.createElement("script");
    script.textContent = await new Response(stream).text();
    document.head.append(script);
  }

  const system = matchMedia("(prefers-color-scheme: dark)");
  let chosen = null;
  try { chosen = localStorage.getItem("lockstep-theme"); } catch { /* as above */ }
  setTheme(chosen === "dark" || chosen === "light" ? chosen : system.matches ? "dark" : "light", false);
  const loaded = load();
  let charts = data.charts;
  const again = () => loaded.then(() => drawAll(charts));
  const show = (others) => { charts = others; return again(); };
  system.addEventListener("change", () => { setTheme(system.matches ? "dark" : "light", false); again(); });
  document.getElementById("theme").addEventListener("click", () => { setTheme(isDark() ? "light" : "dark", true); again(); });
  // By its width alone: a phone that hides its address bar changes nothing that is drawn.
  let width = innerWidth, wait = 0;
  addEventListener("resize", () => {
    if (innerWidth === width) return;
    width = innerWidth;
    clearTimeout(wait);
    wait = setTimeout(again, 100);
  });
  let onScreen = "light";
  // Paper is white, and printed before any promise is kept: `draw` does all that can be seen before it first waits.
  addEventListener("beforeprint", () => {
    onScreen = document.documentElement.dataset.theme;
    setTheme("light", false);
    if (window.Plotly) charts.forEach(draw);
  });
  addEventListener("afterprint", () => { setTheme(onScreen, false); again(); });
  const bind = () => document.querySelectorAll('input[name="axis"]').forEach((input) => {
    input.checked = input.value === axis;
    input.addEventListener("change", () => { axis = input.value; again(); });
  });
  bind();
  again();
  return { data, show, bind };
})();
