// Moves the sliders of a plan's page: looks up what was simulated at each setting, says it and draws it.
(() => {
  const plan = lockstep.data.plan, { columns, words } = plan;
  const get = (id) => document.getElementById(id);
  const parts = {
    input_s: ["waiting for input", "--green"], forward_s: ["forward", "--sky"], backward_s: ["backward", "--blue"],
    slowest_s: ["waiting for the slowest rank", "--gray"], communicate_s: ["exposed communication", "--orange"],
    launch_s: ["waiting for the host", "--red"], update_s: ["update", "--purple"],
  };
  const scalings = { strong: "--blue", weak: "--orange" };
  const lineColors = ["--blue", "--green", "--purple", "--orange"];
  const height = 320;
  const asked = { scaling: "strong", ...plan.start };
  let setting = { ...asked };
  const isAsked = () => JSON.stringify(setting) === JSON.stringify(asked);

  // Numbers as people read them, never as a power of ten.
  const fixed = (value, places) =>
    value.toLocaleString("en-US", { minimumFractionDigits: places, maximumFractionDigits: places });
  const digits = (value, most = 3) =>
    Number(value.toPrecision(most)).toLocaleString("en-US", { maximumFractionDigits: 20 });
  const whole = (value) => fixed(Math.round(value), 0);
  const count = (value) => fixed(value, value < 10 ? 2 : value < 100 ? 1 : 0);
  const percent = (share) => `${fixed(100 * share, 1)} %`;
  const milliseconds = (seconds) => `${seconds >= 0.1 ? whole(seconds * 1e3) : digits(seconds * 1e3)} ms`;
  const microseconds = (seconds) => `${digits(seconds * 1e6)} µs`;
  const dollars = (value) => `$ ${value < 10 ? fixed(value, 2) : whole(value)}`;
  const kilowattHours = (value) => `${digits(value)} kWh`;
  const size = (bytes) => `${digits(bytes / 1e9)} GB`;
  const rate = (bytes) => `${size(bytes)}/s`;
  const plural = (number, noun) => `${whole(number)} ${noun}${number === 1 ? "" : noun.endsWith("s") ? "es" : "s"}`;
  const times = (factor) => `× ${digits(factor)}`;
  const begin = (text) => text.charAt(0).toUpperCase() + text.slice(1);
  function time(seconds) {
    if (seconds >= 172800) return `${digits(seconds / 86400)} days`;
    if (seconds >= 7200) return `${digits(seconds / 3600)} h`;
    return seconds >= 120 ? `${digits(seconds / 60)} min` : `${digits(seconds)} s`;
  }

  // What was simulated at a setting: any column of it, or the sentence why there is nothing.
  function find(where) {
    const place = plan[where.scaling].places[where.devices][where[where.scaling]];
    if (typeof place === "string") return { reason: place };
    const network = where.bandwidth * plan.latencies.length + where.latency;
    const value = (name) => {
      const found = columns[name][place];
      return Array.isArray(found) ? found[network] : found;
    };
    return { value, word: (name) => words[name][value(name)] };
  }
  // The sizes at which a scaling is possible, batch and network as they are.
  const sweep = (scaling) =>
    plan.devices.map((_, devices) => find({ ...setting, scaling, devices })).filter((one) => one.value);

  // What devices cost: dollars, energy where nobody names a price, or their hours.
  const cost = (() => {
    const isKnown = (name) => [columns[name][0]].flat()[0] !== null;
    if (isKnown("dollars")) return { name: "cost", of: (one) => one.value("dollars"), tell: dollars };
    if (isKnown("energy_j")) return { name: "energy", of: (one) => one.value("energy_j") / 3.6e6, tell: kilowattHours };
    const of = (one) => one.value("devices") * one.value("train_s") / 3600;
    return { name: "device hours", of, tell: (hours) => `${digits(hours)} h` };
  })();

  function element(name, text, className) {
    const made = document.createElement(name);
    if (text !== undefined) made.textContent = text;
    if (className) made.className = className;
    return made;
  }

  // A table like the page's others: the first column names the rows, numbers stand to the right.
  function table(caption, heads, rows) {
    const scroll = element("div", undefined, "scroll whole"), made = element("table");
    scroll.tabIndex = 0;
    scroll.setAttribute("role", "region");
    scroll.setAttribute("aria-label", caption);
    const isRight = heads.map((_, place) => place > 0 && rows.every((row) => /^[$×–\d]/.test(row[place])));
    const line = (cells, first, other) => {
      const row = element("tr");
      row.append(...cells.map((text, place) => {
        const cell = element(place ? other : first, text, isRight[place] ? "number" : "");
        if (cell.nodeName === "TH") cell.scope = first === other ? "col" : "row";
        return cell;
      }));
      return row;
    };
    const head = element("thead"), body = element("tbody");
    head.append(line(heads, "th", "th"));
    body.append(...rows.map((row) => line(row, "th", "td")));
    made.append(element("caption", caption), head, body);
    scroll.append(made);
    return scroll;
  }

  function showSliders() {
    const { scaling } = setting, samples = plan[scaling].sizes;
    const told = {
      devices: [setting.devices, plan.devices, whole],
      batch: [setting[scaling], samples, (number) => `${whole(number)} for ${scaling === "strong" ? "all" : "each"}`],
      bandwidth: [setting.bandwidth, plan.bandwidths, rate],
      latency: [setting.latency, plan.latencies, microseconds],
    };
    Object.entries(told).forEach(([name, [place, stops, tell]]) => {
      const input = get(name), text = tell(stops[place]);
      input.max = String(stops.length - 1);
      input.value = String(place);
      input.disabled = stops.length < 2;
      input.setAttribute("aria-valuetext", text);
      get(`${name}-value`).textContent = text;
    });
    document.querySelectorAll('input[name="scaling"]').forEach((input) => { input.checked = input.value === scaling; });
    get("reset").disabled = isAsked();
  }

  function listFacts({ value }) {
    const before = find(asked);
    const against = (name) => (isAsked() ? "" : `, ${times(value(name) / before.value(name))} as asked`);
    const lasts = `${digits(plan.epochs, 6)} epochs, ${plural(value("steps"), "step")}`;
    const facts = [["Time", time(value("train_s")), `${lasts}${against("train_s")}`]];
    if (value("dollars") !== null) {
      const price = `at $ ${digits(plan.dollars_per_device_hour, 6)} a device hour`;
      facts.push(["Cost", dollars(value("dollars")), `${price}${against("dollars")}`]);
    }
    if (value("energy_j") !== null) {
      facts.push(["Energy", kilowattHours(value("energy_j") / 3.6e6), "at the nodes' full power"]);
    }
    const shares = `${plural(value("batch_per_device"), "image")} a device, ${plural(value("passes"), "pass")}`;
    facts.push(["A step", milliseconds(value("step_s")), shares]);
    facts.push(["Memory of a device", size(value("memory_bytes")), `of ${size(plan.memory_limit_bytes)}`]);
    return facts;
  }

  function listPairs({ value, word }) {
    const sent = `${milliseconds(value("comm_s"))} of messages, ${milliseconds(value("communicate_s"))} exposed`;
    const pairs = [
      ["devices", `${whole(value("devices"))} in ${plural(value("nodes"), "node")}`],
      ["global batch", plural(value("global_batch"), "image")],
      ["gradients", `${word("reduction")}; ${sent}`],
      ["of best", `${percent(value("efficiency_whole"))} of a device's best rate at any batch`],
    ];
    if (plan.node) {
      const { cores, storage_bytes_per_s: storage } = plan.node;
      const decoding = `${count(value("node_decode_cores"))}${cores ? ` of ${cores}` : ""} cores to decode`;
      const reading = `${rate(value("node_storage_bytes_per_s"))}${storage ? ` of ${rate(storage)}` : ""} from storage`;
      pairs.push(["a node's input", `${whole(value("node_images_per_second"))} images/s: ${decoding}, ${reading}`]);
    }
    return pairs;
  }

  function showHeadline(found) {
    get("reason").textContent = found.reason || "";
    get("reason").hidden = !found.reason;
    ["binds", "facts", "equation", "pairs"].forEach((id) => { get(id).hidden = Boolean(found.reason); });
    if (found.reason) return;
    const pair = (name, value, ...rest) => {
      const made = element("div");
      made.append(element("dt", name), element("dd", value), ...rest);
      return made;
    };
    get("binds").textContent = found.word("advice");
    get("facts").replaceChildren(...listFacts(found).map(([name, value, beside]) =>
      pair(name, value, element("dd", beside, "beside"))));
    get("pairs").replaceChildren(...listPairs(found).map(([name, value]) => pair(name, value)));
    const terms = [
      ["T", count(found.value("images_per_second")), "images/s"],
      ["S", count(found.value("speed_one_rank")), "images/s of one device alone"],
      ["N", whole(found.value("devices")), found.value("devices") === 1 ? "device" : "devices"],
      ["e", percent(found.value("efficiency")), "efficiency"],
    ];
    get("equation").replaceChildren(...terms.flatMap(([letter, value, unit], place) => {
      const term = element("div", undefined, "term"), sign = element("span", place === 1 ? "=" : "·", "sign");
      term.append(element("span", letter, "letter"), element("b", value), element("span", unit));
      sign.setAttribute("aria-hidden", "true");
      return place ? [sign, term] : [term];
    }));
  }

  // One slider moved by one stop, either way: what a reader would try first.
  function showChanged(found) {
    const { scaling } = setting;
    const sliders = {
      devices: [plan.devices, (number) => plural(number, "device")],
      [scaling]: [plan[scaling].sizes, (number) => (scaling === "strong" ? `global batch ${whole(number)}`
        : `${plural(number, "image")} a device`)],
      bandwidth: [plan.bandwidths, (number) => `bandwidth ${rate(number)}`],
      latency: [plan.latencies, (number) => `latency ${microseconds(number)}`],
    };
    const row = (name, one) => [name, time(one.value("train_s")),
      found.value ? times(one.value("train_s") / found.value("train_s")) : "–",
      cost.tell(cost.of(one)), percent(one.value("efficiency")), one.word("binds")];
    const rows = found.value ? [row("now", found)] : [];
    Object.entries(sliders).forEach(([name, [stops, tell]]) => [1, -1].forEach((way) => {
      const place = setting[name] + way;
      const one = place in stops ? find({ ...setting, [name]: place }) : {};
      if (one.value) rows.push(row(tell(stops[place]), one));
    }));
    const heads = ["if it were", "time", "of now", cost.name, "e", "binds"];
    get("changed").replaceChildren(...(rows.length ? [table("One thing changed", heads, rows)] : []));
  }

  function showEvery() {
    const heads = ["devices", "scaling", "each", "step", ...plan.parts.map((name) => parts[name][0]), "e", "of best",
      "time", cost.name, "binds"];
    const rows = Object.keys(scalings).flatMap((scaling) => sweep(scaling).map((one) => [
      whole(one.value("devices")), scaling, whole(one.value("batch_per_device")),
      ...["step_s", ...plan.parts].map((name) => digits(one.value(name) * 1e3, 4)), percent(one.value("efficiency")),
      percent(one.value("efficiency_whole")), time(one.value("train_s")), cost.tell(cost.of(one)), one.word("binds")]));
    const details = get("every").querySelector("details") || element("details");
    details.replaceChildren(element("summary", "Numbers of the charts"),
      table("Every size at this batch and network; a step and its parts in milliseconds", heads, rows));
    get("every").replaceChildren(details);
  }

  const clocks = [1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 18000, 36000, 86400, 172800, 432000, 864000,
    2592000, 8640000, 31536000, 315360000];
  const rounds = Array.from({ length: 21 }, (_, place) => [1, 2, 5].map((one) => one * 10 ** (place - 6))).flat();
  // An axis that is a logarithm, with few numbers on it.
  function scale(values, steps, tell) {
    const low = Math.min(...values), high = Math.max(...values);
    let ticks = steps.filter((one) => one >= low / 1.3 && one <= high * 1.3);
    while (ticks.length > 6) ticks = ticks.filter((_, place) => place % 2 === 0);
    const range = [Math.log10(low / 1.35), Math.log10(high * 1.35)];
    return { type: "log", tickvals: ticks, ticktext: ticks.map(tell), range };
  }
  const sizeAxis = () => ({ ...scale(plan.devices, plan.devices, whole), title: { text: "devices" } });

  const line = (name, color, points, more = {}) => ({
    type: "scatter", mode: "lines+markers", name, x: points.map((one) => one.x), y: points.map((one) => one.y),
    text: points.map((one) => one.text), hovertemplate: "%{text}<extra></extra>", line: { color, width: 2 },
    marker: { color, size: 6 }, ...more });
  const ring = (points, x) => line("chosen", "--ink", points.filter((one) => one.x === x), {
    mode: "markers", showlegend: false, hoverinfo: "skip", hovertemplate: undefined,
    marker: { symbol: "circle-open", size: 14, color: "--ink", line: { width: 2, color: "--ink" } } });
  const dashed = (color, dash, width) => ({ mode: "lines", line: { color, width, dash } });
  const name = (scaling) =>
    `${scaling}: ${whole(plan[scaling].sizes[setting[scaling]])} for ${scaling === "strong" ? "all" : "each"}`;
  const ends = (points) =>
    `${points[0].told} on ${whole(points[0].x)}, ${points.at(-1).told} on ${plural(points.at(-1).x, "device")}`;

  // One quantity at every size: points of a line.
  const place = (sizes, of, tell, what = "") => sizes.map((one) => {
    const x = one.value("devices"), y = of(one), told = tell(y);
    return { x, y, told, text: `${plural(x, "device")}: ${what}${told}` };
  });
  const chosen = () => plan.devices[setting.devices];

  function drawSizes(id, of, tell, steps, more) {
    const drawn = Object.keys(scalings).map((scaling) => [scaling, place(sweep(scaling), of, tell)])
      .filter(([, points]) => points.length);
    const traces = drawn.map(([scaling, points]) => line(name(scaling), scalings[scaling], points));
    drawn.forEach(([scaling, points]) => {
      if (scaling === setting.scaling) traces.push(ring(points, chosen()));
      if (scaling === "strong") traces.push(...more(points));
    });
    const yaxis = scale(drawn.flatMap(([, points]) => points.map((one) => one.y)), steps, tell);
    const says = drawn.map(([scaling, points]) => `${name(scaling)}, ${ends(points)}`).join("; ");
    return { name: id, height, traces, says: `${begin(says)}.`, layout: { xaxis: sizeAxis(), yaxis } };
  }

  function drawPerfect(points) {
    const ideal = points.map((one) => {
      const y = points[0].y * points[0].x / one.x;
      return { x: one.x, y, text: `perfect: ${time(y)}` };
    });
    return points.length > 1 ? [line("perfect scaling", "--gray", ideal, dashed("--gray", "dot", 1))] : [];
  }

  function drawEfficiency() {
    const traces = [], told = [];
    Object.entries(scalings).forEach(([scaling, color]) => {
      const sizes = sweep(scaling);
      if (!sizes.length) return;
      const reached = place(sizes, (one) => one.value("efficiency"), percent, "e ");
      const best = place(sizes, (one) => one.value("efficiency_whole"), percent, "of best ");
      traces.push(line(`e, ${scaling}`, color, reached));
      traces.push(line(`of best, ${scaling}`, color, best, dashed(color, "dash", 1.5)));
      if (scaling === setting.scaling) traces.push(ring(reached, chosen()));
      told.push(`${name(scaling)}, e ${ends(reached)}; of a device's best rate ${ends(best)}`);
    });
    const layout = { xaxis: sizeAxis(), yaxis: { range: [0, 1.06], tickformat: ".0%", dtick: 0.2 } };
    return { name: "efficiency", height, traces, says: `${begin(told.join("; "))}.`, layout };
  }

  function drawNetwork() {
    const drawn = plan.latencies.map((latency_s, latency) => plan.bandwidths.map((bytes, bandwidth) => {
      const one = find({ ...setting, latency, bandwidth });
      if (!one.value) return null;
      const y = one.value("train_s"), told = time(y);
      return { x: bytes / 1e9, y, told, text: `${rate(bytes)}, ${microseconds(latency_s)}: ${told}` };
    }).filter(Boolean));
    const widths = plan.bandwidths.map((bytes) => bytes / 1e9), here = drawn[setting.latency];
    const traces = drawn.map((points, at) => line(microseconds(plan.latencies[at]), lineColors[at], points));
    traces.push(ring(here, widths[setting.bandwidth]));
    const says = here.length ? `At ${microseconds(plan.latencies[setting.latency])}: ${here[0].told} with ` +
      `${digits(here[0].x)} GB/s, ${here.at(-1).told} with ${digits(here.at(-1).x)} GB/s.` : "Nothing runs here.";
    const most = 1.1 * Math.max(1e-3, ...drawn.flat().map((one) => one.y));
    const step = (most > 120 ? clocks : rounds).findLast((one) => one <= most / 3);
    const ticks = Array.from({ length: 12 }, (_, at) => at * step).filter((one) => one <= most);
    const xaxis = { ...scale(widths, widths, (one) => digits(one)), title: { text: "GB/s" } };
    const yaxis = { range: [0, most], tickvals: ticks, ticktext: ticks.map((one) => (one ? time(one) : "0")) };
    return { name: "network", height, traces, says, layout: { xaxis, yaxis } };
  }

  function drawParts() {
    const sizes = sweep(setting.scaling), places = sizes.map((_, at) => at);
    const used = plan.parts.filter((part) => sizes.some((one) => one.value(part) > 0));
    const share = (one, part) => one.value(part) / one.value("step_s");
    const traces = used.map((part) => ({
      type: "bar", orientation: "h", name: parts[part][0], y: places, x: sizes.map((one) => share(one, part)),
      text: place(sizes, (one) => one.value(part), milliseconds, `${parts[part][0]} `).map((one) => one.text),
      textposition: "none", hovertemplate: "%{text}<extra></extra>", marker: { color: parts[part][1] } }));
    const here = sizes.find((one) => one.value("devices") === chosen());
    const told = here && used.map((part) => `${parts[part][0]} ${percent(share(here, part))}`).join(", ");
    const says = here ? `${name(setting.scaling)}; on ${plural(chosen(), "device")} a step of ` +
      `${milliseconds(here.value("step_s"))}: ${told}.` : `${name(setting.scaling)}.`;
    const ticktext = sizes.map((one) => `${whole(one.value("devices"))}: ${milliseconds(one.value("step_s"))}`);
    const layout = { barmode: "stack", yaxis: { autorange: "reversed", tickvals: places, showgrid: false, ticktext },
      xaxis: { range: [0, 1], tickformat: ".0%", title: { text: "share of the step" } } };
    return { name: "parts", height: 120 + 30 * Math.max(1, sizes.length), traces, says: begin(says), layout };
  }

  function show() {
    const found = find(setting);
    showSliders();
    showHeadline(found);
    showChanged(found);
    showEvery();
    const charts = [drawSizes("time", (one) => one.value("train_s"), time, clocks, drawPerfect),
      drawSizes("cost", cost.of, cost.tell, rounds, () => []), drawEfficiency(), drawNetwork(), drawParts()];
    charts.forEach((chart) => {
      chart.isEmpty = !chart.traces.some((trace) => trace.x.length);
      get(`${chart.name}-says`).textContent = chart.says;
      get(`chart-${chart.name}`).closest("figure").hidden = chart.isEmpty;
    });
    lockstep.show(charts.filter((chart) => !chart.isEmpty).map((chart) => ({ marks: [], ...chart })));
  }

  ["devices", "batch", "bandwidth", "latency"].forEach((id) => get(id).addEventListener("input", (event) => {
    setting[id === "batch" ? setting.scaling : id] = Number(event.target.value);
    show();
  }));
  document.querySelectorAll('input[name="scaling"]').forEach((input) => input.addEventListener("change", () => {
    setting.scaling = input.value;
    show();
  }));
  get("reset").addEventListener("click", () => { setting = { ...asked }; show(); });
  get("controls").hidden = false;
  get("headline").hidden = false;
  show();
})();
