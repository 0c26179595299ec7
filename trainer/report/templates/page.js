// Draws the charts and colours the tokens of a page from their data- attributes. Everything is set as text.
(() => {
  "use strict";
  const all = (selector, inside) => [...(inside || document).querySelectorAll(selector)];
  const clamp = (value, low, high) => Math.min(Math.max(value, low), high);

  function make(name, attributes, ...children) {
    const svg = ["svg", "line", "path", "circle", "text", "g"].includes(name);
    const made = svg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
    for (const [key, value] of Object.entries(attributes || {})) made.setAttribute(key, value);
    made.append(...children);
    return made;
  }

  const trim = text => text.includes(".") ? text.replace(/\.?0+$/, "") : text;
  function short(value) {
    const size = Math.abs(value);
    for (const [unit, factor] of [["T", 1e12], ["B", 1e9], ["M", 1e6], ["k", 1e4]])
      if (size >= factor) return trim((value / (unit === "k" ? 1e3 : factor)).toPrecision(4)) + unit;
    return size && size < 1e-3 ? value.toExponential(2).replace(/\.?0+e/, "e") : trim(value.toPrecision(4));
  }

  // ------------------------------------------------------------------ charts

  const tools = document.querySelector(".tools"), runs = tools ? JSON.parse(tools.dataset.runs) : [];
  const charts = all("figure[data-chart]").map(figure => ({figure, ...JSON.parse(figure.dataset.chart), at: -1}));
  const axis = () => tools.elements.axis.value;

  function onAxis(value) {
    if (axis() === "tokens") return short(value);
    if (axis() === "step") return Math.round(value).toLocaleString("en");
    const [unit, size] = value >= 7200 ? ["h", 3600] : value >= 120 ? ["min", 60] : ["s", 1];
    return `${trim((value / size).toPrecision(3))} ${unit}`;
  }

  function ticks(low, high, count) {
    const raw = (high - low) / count, size = 10 ** Math.floor(Math.log10(raw)), share = raw / size;
    const step = (share <= 1 ? 1 : share <= 2 ? 2 : share <= 5 ? 5 : 10) * size, found = [];
    for (let i = Math.ceil(low / step - 1e-9); i * step <= high + 1e-9 * step; i++) found.push(i * step + 0);
    return found;
  }

  function logTicks(low, high) {
    const from = Math.floor(Math.log10(low)), to = Math.ceil(Math.log10(high)), found = [];
    for (let power = from; power <= to; power += Math.ceil((to - from) / 6))
      for (const factor of to - from > 3 ? [1] : [1, 2, 5]) found.push(factor * 10 ** power);
    return found.filter(value => value >= low * 0.999 && value <= high * 1.001);
  }

  // Where steps are on the x axis, between the rows of metrics that say so; null: the run does not say.
  function places(run, steps) {
    if (axis() === "step") return steps;
    if (!runs[run][axis()]) return null;
    const [known, values] = runs[run][axis()];
    return steps.map(step => {
      const i = clamp(known.findIndex(other => other >= step), 0, known.length - 1);
      if (step >= known[known.length - 1]) return values[values.length - 1];
      const before = i ? [known[i - 1], values[i - 1]] : [0, 0];
      return before[1] + (values[i] - before[1]) * (step - before[0]) / Math.max(known[i] - before[0], 1);
    });
  }

  function means(ys) {  // of as many points around each as a fortieth of all
    const half = Math.max(2, Math.floor(ys.length / 80));
    return ys.length < 30 ? ys : ys.map((y, i) => {
      const reach = Math.min(half, i, ys.length - 1 - i);
      const near = ys.slice(i - reach, i + reach + 1).filter(other => other !== null);
      return y === null ? null : near.reduce((a, b) => a + b) / near.length;
    });
  }

  function draw(chart) {
    const {figure, levels} = chart, plot = figure.querySelector(".plot");
    const width = Math.max(plot.clientWidth, 200), height = figure.classList.contains("large") ? 360 : 190;
    const hidden = new Set(all("input[name=run]:not(:checked)", tools).map(input => Number(input.value)));
    const smooth = tools.elements.smooth.checked;
    const lines = chart.shown = chart.lines.filter(line => !hidden.has(line.run)).map((line, i) => ({
      x: places(line.run, line.x), y: smooth ? means(line.y) : line.y, name: line.label || runs[line.run].name,
      colour: runs.length > 1 ? line.run : i})).filter(line => line.x);
    leave(chart);
    const good = lines.flatMap(line => line.x.map((x, i) => [x, line.y[i]]).filter(([, y]) => y !== null));
    if (!good.length) return plot.replaceChildren(make("p", {class: "summary"}, "Nothing to show on this axis."));
    const range = values => [values.reduce((a, b) => Math.min(a, b)), values.reduce((a, b) => Math.max(a, b))];
    let [first, last] = range(good.map(([x]) => x));
    let [low, high] = range([...good.map(([, y]) => y), ...levels.map(level => level[1])]);
    const log = tools.elements.log.checked && low > 0, scale = log ? Math.log : value => value;
    if (first === last) [first, last] = [first - 1, last + 1];
    const slack = log ? (high / low) ** 0.04 || 2 : (high - low) * 0.04 || Math.abs(low || 1) * 0.1;
    [low, high] = log ? [low / slack, high * slack] : [low - slack, high + slack];
    const yTicks = log ? logTicks(low, high) : ticks(low, high, height / 34);
    const left = 10 + Math.max(...yTicks.map(value => short(value).length), 3) * 6.2;
    const right = width - 10, bottom = height - 22;
    const toX = x => left + (x - first) / (last - first) * (right - left);
    const toY = y => bottom - (scale(y) - scale(low)) / (scale(high) - scale(low)) * (bottom - 8);
    const picture = make("svg", {width, height, viewBox: `0 0 ${width} ${height}`, role: "img", tabindex: 0,
                                 "aria-label": figure.querySelector("h4").textContent});
    for (const value of yTicks) {
      picture.append(make("line", {class: "gridline", x1: left, x2: right, y1: toY(value), y2: toY(value)}),
                     make("text", {x: left - 5, y: toY(value) + 4, "text-anchor": "end"}, short(value)));
    }
    const unit = axis() !== "seconds" ? 1 : last >= 7200 ? 3600 : last >= 120 ? 60 : 1;
    for (const value of ticks(first / unit, last / unit, Math.max(2, Math.floor((width - left) / 70)))) {
      if (axis() === "step" && value !== Math.round(value)) continue;
      const x = toX(value * unit), anchor = x > width - 30 ? "end" : x < left + 12 ? "start" : "middle";
      picture.append(make("text", {x, y: height - 5, "text-anchor": anchor}, onAxis(value * unit)));
    }
    for (const [label, y] of levels) {
      picture.append(make("line", {class: "level", x1: left, x2: right, y1: toY(y), y2: toY(y)}),
                     make("text", {x: right, y: toY(y) - 3, "text-anchor": "end"}, `${label} ${short(y)}`));
    }
    for (const line of [...lines].reverse()) picture.append(curve(line, toX, toY, log));  // the first is on top
    plot.replaceChildren(picture);
    Object.assign(chart, {picture, toX, toY, width});
  }

  function curve(line, toX, toY, log) {
    let text = "", pen = "M";
    const group = make("g", {class: `l${line.colour % 8}`});
    line.x.forEach((x, i) => {
      const y = line.y[i], at = toX(x).toFixed(1);
      if (y === null) group.append(make("path", {class: "nonfinite", d: `M${at - 3} 5l6 6m0 -6l-6 6`}));
      if (y === null || (log && y <= 0)) return pen = "M";
      text += `${pen}${at} ${toY(y).toFixed(1)}`;
      pen = "L";
      if (line.x.length <= 40) group.append(make("circle", {class: "dot", cx: at, cy: toY(y), r: 2.2}));
    });
    group.prepend(make("path", {class: `line ${["", "dash1", "dash2"][Math.floor(line.colour / 8) % 3]}`, d: text}));
    return group;
  }

  const nearest = (xs, x) => xs.reduce((best, other, i) => Math.abs(other - x) < Math.abs(xs[best] - x) ? i : best, 0);
  const leave = chart => all(".tip, .crosshair", chart.figure).forEach(old => old.remove());

  // The values of all lines at one place of the x axis.
  function point(chart, x) {
    leave(chart);
    const at = chart.at = chart.shown.map(line => line.x[nearest(line.x, x)]).reduce(
      (best, other) => Math.abs(other - x) < Math.abs(best - x) ? other : best);
    const x1 = chart.toX(at), head = {step: "step ", tokens: "tokens ", seconds: ""}[axis()] + onAxis(at);
    const tip = make("div", {class: "tip", role: "status"}, head);
    const marks = make("g", {class: "crosshair"}, make("line", {class: "cross", x1, x2: x1, y1: 8, y2: 500}));
    for (const line of chart.shown.filter(one => one.x[0] <= at && at <= one.x[one.x.length - 1]).slice(0, 16)) {
      const i = nearest(line.x, at), y = line.y[i], cx = chart.toX(line.x[i]);
      tip.append(make("div", {}, make("span", {class: `swatch l${line.colour % 8}`}),
                      chart.shown.length > 1 ? line.name : "", make("b", {}, y === null ? "not finite" : short(y))));
      if (y !== null) marks.append(make("circle", {class: `dot l${line.colour % 8}`, cx, cy: chart.toY(y), r: 3.5}));
    }
    chart.picture.append(marks);
    chart.figure.append(tip);
    tip.style[x1 > chart.width / 2 ? "left" : "right"] = "1rem";
  }

  for (const chart of charts) {
    const plot = chart.figure.querySelector(".plot"), usable = () => chart.picture && plot.contains(chart.picture);
    const under = event => {
      const box = usable() && chart.picture.getBoundingClientRect(), zero = usable() && chart.toX(0);
      if (box) point(chart, ((event.clientX - box.left) * chart.width / box.width - zero) / (chart.toX(1) - zero));
    };
    plot.addEventListener("pointermove", under);
    plot.addEventListener("pointerdown", under);
    plot.addEventListener("pointerleave", () => leave(chart));
    plot.addEventListener("keydown", event => {
      const by = {ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity}[event.key];
      if (!by || !usable()) return;
      event.preventDefault();
      const xs = chart.shown[0].x, now = chart.at < 0 ? -1 : nearest(xs, chart.at);
      point(chart, xs[clamp(now + by, 0, xs.length - 1)]);
    });
    chart.figure.querySelector("h4").addEventListener("click", () => {
      chart.figure.classList.toggle("large");
      draw(chart);
    });
  }
  if (tools) {
    const drawAll = () => charts.forEach(draw);
    tools.addEventListener("change", drawAll);
    drawAll();
    let width = document.body.clientWidth;
    addEventListener("resize", () => {
      if (document.body.clientWidth !== width) { width = document.body.clientWidth; drawAll(); }
    });
  }

  // ------------------------------------------------------------------ tokens

  const switcher = document.getElementById("switch");
  if (!switcher) return;
  const columns = JSON.parse(switcher.dataset.columns), told = document.getElementById("told");
  const boxes = all(".tokens"), parts = boxes.map(box => JSON.parse(box.dataset.tokens)), where = new Map();
  boxes.forEach((box, b) => [...box.children].forEach((element, t) => where.set(element, [b, t])));
  let chosen = null;

  const twoSided = column => ["signed", "ratio"].includes(column.kind);
  const onLog = column => ["ratio", "rank"].includes(column.kind);
  const minus = text => text.replace("-", "−"), quoted = text => `“${text.replaceAll(" ", "␣")}”`;
  const numberOf = x => x === null || x === undefined ? "–" : typeof x === "string" ? x : minus(String(x));

  // From -1 to 1: how strong the colour is, and which.
  function strength(column, x) {
    const value = onLog(column) ? Math.log(Math.max(x, 1e-30)) : column.kind === "low" ? -x : x;
    return clamp(value / column.scale, -1, 1);
  }
  function colour(column, s) {
    const name = twoSided(column) ? (s < 0 ? "--less" : "--more") : "--strong";
    return Math.abs(s) < 0.004 ? "" : `rgb(var(${name}) / ${(0.08 + 0.52 * Math.abs(s)).toFixed(3)})`;
  }

  function paint() {
    const column = columns[switcher.querySelector("input:checked").value];
    for (const [element, [b, t]] of where) {
      const x = (parts[b].values[column.key] || [])[t];
      element.classList.toggle("odd", typeof x === "string");
      element.style.backgroundColor = typeof x === "number" ? colour(column, strength(column, x)) : "";
    }
    const [left, bar, right] = document.getElementById("legend").children;
    const show = x => minus(String(Number(x.toPrecision(3))));
    const end = onLog(column) ? Math.exp(column.scale) : column.scale;
    left.textContent = `${column.says[0]} ${show({signed: -end, ratio: 1 / end, rank: 1}[column.kind] || 0)}`;
    right.textContent = `${show(column.kind === "low" ? -end : end)} ${column.says[1]}`;
    const stops = (twoSided(column) ? [-1, -0.5, 0, 0.5, 1] : [0, 0.5, 1]).map(s => colour(column, s) || "transparent");
    bar.style.background = `linear-gradient(to right, ${stops.join(", ")})`;
  }

  function tell(element) {
    const [b, t] = where.get(element), part = parts[b], lines = [];
    document.getElementById("text").textContent = quoted(element.textContent);
    document.getElementById("where").textContent = [
      part.ids && `id ${part.ids[t]}`, part.positions && `position ${part.positions[t]}`, part.where,
    ].filter(Boolean).join(" · ");
    for (const column of columns) {
      const x = (part.values[column.key] || [])[t];
      lines.push([column.label, numberOf(x)]);
      if (column.key === "logprobs" && typeof x === "number") lines.push(["p", Math.exp(x).toPrecision(3)]);
      if (column.key === "ranks" && x > 1) lines.push(["most likely", quoted(part.instead[t])]);
    }
    told.querySelector("dl").replaceChildren(...lines.map(([what, value]) =>
      make("div", {}, make("dt", {}, what), make("dd", {}, value))));
  }

  function choose(element) {
    if (chosen) chosen.classList.remove("chosen");
    chosen = element;
    element.classList.add("chosen");
    tell(element);
  }

  const token = event => event.target.closest(".tokens > i");
  document.body.addEventListener("click", event => { if (token(event)) choose(token(event)); });
  document.body.addEventListener("mouseover", event => { if (token(event)) tell(token(event)); });
  for (const box of boxes) {
    box.addEventListener("keydown", event => {
      const list = [...box.children], last = list.length - 1, now = list.indexOf(chosen);
      const to = {ArrowRight: Math.min(now + 1, last), ArrowLeft: Math.max(now - 1, 0), Home: 0, End: last}[event.key];
      if (to === undefined || last < 0) return;
      event.preventDefault();
      choose(list[to]);
      list[to].scrollIntoView({block: "nearest"});
    });
  }
  switcher.addEventListener("change", paint);
  paint();
})();
