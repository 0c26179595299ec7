// Draws the charts from the JSON in #payload, and lets one look closer. Everything is set as text, nothing as HTML.
(() => {
  "use strict";
  const data = JSON.parse(document.getElementById("payload").textContent);
  const view = {axis: "step", log: false, smooth: true, hidden: new Set()};
  const figures = [...document.querySelectorAll("figure[data-chart]")];
  const drawn = new WeakMap();  // figure → what its crosshair needs
  const MARGIN = {top: 8, right: 10, bottom: 22};

  function svg(name, attributes, text) {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes || {})) made.setAttribute(key, value);
    if (text !== undefined) made.textContent = text;
    return made;
  }

  function html(name, kind, text) {
    const made = document.createElement(name);
    if (kind) made.className = kind;
    if (text !== undefined) made.textContent = text;
    return made;
  }

  // ------------------------------------------------------------------ numbers for people

  function short(value) {
    const size = Math.abs(value);
    for (const [unit, factor] of [["T", 1e12], ["B", 1e9], ["M", 1e6], ["k", 1e3]]) {
      if (size >= factor * (unit === "k" ? 10 : 1)) return trim((value / factor).toPrecision(4)) + unit;
    }
    return size !== 0 && size < 1e-3 ? value.toExponential(2).replace(/\.?0+e/, "e") : trim(value.toPrecision(4));
  }

  const trim = text => text.includes(".") ? text.replace(/\.?0+$/, "") : text;

  function duration(seconds) {
    if (seconds < 1) return seconds < 1e-3 ? short(seconds * 1e6) + " µs" : short(seconds * 1e3) + " ms";
    if (seconds < 120) return trim(seconds.toPrecision(3)) + " s";
    if (seconds < 7200) return trim((seconds / 60).toPrecision(3)) + " min";
    return trim((seconds / 3600).toPrecision(4)) + " h";
  }

  function onAxis(value, brief) {
    if (view.axis === "seconds") return duration(value);
    return view.axis === "tokens" || (brief && value >= 1e5) ? short(value) : Math.round(value).toLocaleString("en");
  }

  // ------------------------------------------------------------------ scales

  function ticks(low, high, count) {
    const raw = (high - low) / count, size = 10 ** Math.floor(Math.log10(raw)), share = raw / size;
    const step = (share <= 1 ? 1 : share <= 2 ? 2 : share <= 5 ? 5 : 10) * size, found = [];
    for (let i = Math.ceil(low / step - 1e-9); i * step <= high + 1e-9 * step; i++) found.push(i * step + 0);
    return found;
  }

  function timeTicks(low, high, count) {
    const unit = high >= 7200 ? 3600 : high >= 120 ? 60 : 1;
    return ticks(low / unit, high / unit, count).map(value => value * unit);
  }

  function logTicks(low, high) {
    const found = [], from = Math.floor(Math.log10(low)), to = Math.ceil(Math.log10(high));
    const factors = to - from > 3 ? [1] : to - from > 1 ? [1, 3] : [1, 2, 5], every = Math.ceil((to - from) / 6);
    for (let power = from; power <= to; power += every)
      for (const factor of factors) {
        const value = factor * 10 ** power;
        if (value >= low * 0.999 && value <= high * 1.001) found.push(value);
      }
    return found.length > 1 ? found : ticks(low, high, 4).filter(value => value > 0);
  }

  // ------------------------------------------------------------------ what is drawn

  // Places on the x axis of a line's steps; null where the run does not say.
  function places(run, steps) {
    if (view.axis === "step") return steps;
    const table = data.runs[run][view.axis];
    if (!table) return null;
    const [known, values] = table;
    let i = 0;
    return steps.map(step => {
      if (step <= known[0]) return view.axis === "tokens" ? values[0] * step / Math.max(known[0], 1) : values[0];
      while (i < known.length - 1 && known[i + 1] < step) i++;
      if (i === known.length - 1) return values[i];
      const share = (step - known[i]) / (known[i + 1] - known[i]);
      return values[i] + share * (values[i + 1] - values[i]);
    });
  }

  function linesOf(chart) {
    const single = chart.lines.length === 1;
    return chart.lines.map((line, number) => {
      const x = places(line.run, data.steps[line.x]), colour = data.runs.length > 1 ? line.run : number;
      const smooth = view.smooth && line.sy ? {x: places(line.run, data.steps[line.sx]), y: line.sy} : null;
      const name = data.runs.length > 1 ? data.runs[line.run].name : line.label || chart.title;
      return {x, y: line.y, smooth, colour, name, single};
    }).filter((line, number) => line.x && !view.hidden.has(chart.lines[number].run));
  }

  function draw(figure) {
    const chart = data.charts[figure.dataset.chart], plot = figure.querySelector(".plot");
    const large = figure.classList.contains("large"), width = Math.max(plot.clientWidth, 200);
    const height = large ? 360 : 190;
    leave(figure);
    const lines = linesOf(chart), all = [], xs = [];
    for (const line of lines) {
      line.y.forEach((y, i) => { if (y !== null) { all.push(y); xs.push(line.x[i]); } });
    }
    for (const level of chart.levels) all.push(level.y);
    drawn.delete(figure);
    if (!xs.length) {
      plot.replaceChildren(html("p", "summary", lines.length ? "No finite values." : "Nothing to show on this axis."));
      return;
    }
    const wantsLog = figure.dataset.log ? figure.dataset.log === "yes" : view.log;
    let low = all.reduce((a, b) => Math.min(a, b)), high = all.reduce((a, b) => Math.max(a, b));
    const log = wantsLog && low > 0;
    figure.querySelector("[data-do=log]").setAttribute("aria-pressed", String(log));
    if (low === high) {
      const some = Math.abs(low || 1) * 0.1;
      [low, high] = log ? [low / 2, high * 2] : [low - some, high + some];
    }
    const slack = log ? (high / low) ** 0.04 : (high - low) * 0.04;
    [low, high] = log ? [low / slack, high * slack] : [low - slack, high + slack];
    let first = xs.reduce((a, b) => Math.min(a, b)), last = xs.reduce((a, b) => Math.max(a, b));
    if (first === last) [first, last] = [first - 1, last + 1];
    const yTicks = log ? logTicks(low, high) : ticks(low, high, height / 34);
    const labels = yTicks.map(short), left = 10 + Math.max(...labels.map(label => label.length)) * 6.2;
    const scale = log ? Math.log : value => value;
    const right = width - MARGIN.right, bottom = height - MARGIN.bottom;
    const toX = x => left + (x - first) / (last - first) * (right - left);
    const toY = y => {
      const share = (scale(y) - scale(low)) / (scale(high) - scale(low));
      return bottom - share * (bottom - MARGIN.top);
    };
    const picture = svg("svg", {width, height, viewBox: `0 0 ${width} ${height}`, role: "img", tabindex: 0,
                                "aria-label": `${chart.title}. ${figure.querySelector(".summary").textContent}`});
    yTicks.forEach((value, i) => {
      picture.append(svg("line", {class: "gridline", x1: left, x2: right, y1: toY(value), y2: toY(value)}),
                     svg("text", {x: left - 5, y: toY(value) + 4, "text-anchor": "end"}, labels[i]));
    });
    const find = view.axis === "seconds" ? timeTicks : ticks;
    for (const value of find(first, last, Math.max(2, Math.floor((width - left) / 60)))) {
      if (view.axis === "step" && value !== Math.round(value)) continue;
      const x = toX(value), anchor = x > width - 30 ? "end" : x < left + 12 ? "start" : "middle";
      picture.append(svg("line", {class: "axis", x1: x, x2: x, y1: bottom, y2: bottom + 4}),
                     svg("text", {x, y: height - 5, "text-anchor": anchor}, onAxis(value, true)));
    }
    picture.append(svg("line", {class: "axis", x1: left, x2: right, y1: bottom, y2: bottom}));
    chart.levels.forEach((level, i) => {
      const y = toY(level.y), [x, anchor] = i % 2 ? [left + 2, "start"] : [right - 2, "end"];
      picture.append(svg("line", {class: "level", x1: left, x2: right, y1: y, y2: y}),
                     svg("text", {x, y: y - 3, "text-anchor": anchor}, `${level.label} ${short(level.y)}`));
    });
    for (const line of [...lines].reverse()) addLine(picture, line, toX, toY, log);  // the first is on top
    plot.replaceChildren(picture);
    drawn.set(figure, {lines, toX, toY, left, width, height, picture, at: -1});
  }

  function path(xs, ys, toX, toY, log) {
    let text = "", pen = false;
    xs.forEach((x, i) => {
      if (ys[i] === null || (log && ys[i] <= 0)) { pen = false; return; }
      text += `${pen ? "L" : "M"}${toX(x).toFixed(1)} ${toY(ys[i]).toFixed(1)}`;
      pen = true;
    });
    return text;
  }

  function addLine(picture, line, toX, toY, log) {
    const kind = `l${line.colour % 8}`, dash = line.colour < 4 ? "" : line.colour < 8 ? " dash1" : " dash2";
    const group = svg("g", {class: kind});
    const add = (part, more) => group.append(svg("path", {class: `line${dash}${more}`,
                                                          d: path(part.x, part.y, toX, toY, log)}));
    add(line, line.smooth ? " raw" : "");
    if (line.smooth) add(line.smooth, "");
    if (line.y.length <= 40) {
      line.x.forEach((x, i) => {
        if (line.y[i] !== null) group.append(svg("circle", {class: "dot", cx: toX(x), cy: toY(line.y[i]), r: 2.2}));
      });
    }
    line.x.forEach((x, i) => {
      if (line.y[i] !== null) return;
      const at = toX(x), mark = svg("path", {class: "nonfinite", d: `M${at - 3} ${MARGIN.top - 3}l6 6m0 -6l-6 6`});
      mark.append(svg("title", {}, "not finite"));
      group.append(mark);
    });
    picture.append(group);
  }

  // ------------------------------------------------------------------ the crosshair

  function nearest(xs, x) {
    let low = 0, high = xs.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (xs[middle] < x) low = middle; else high = middle;
    }
    return Math.abs(xs[low] - x) <= Math.abs(xs[high] - x) ? low : high;
  }

  function point(figure, x) {
    const state = drawn.get(figure);
    if (!state) return;
    leave(figure);
    const rows = [], marks = svg("g", {class: "crosshair"});
    let where = null, distance = Infinity;
    for (const line of state.lines) {
      const found = line.x[nearest(line.x, x)];
      if (Math.abs(found - x) < distance) { distance = Math.abs(found - x); where = found; }
    }
    if (where === null) return;
    marks.append(svg("line", {class: "cross", x1: state.toX(where), x2: state.toX(where), y1: MARGIN.top,
                              y2: state.height - MARGIN.bottom}));
    for (const line of state.lines) {
      const i = nearest(line.x, where), value = line.y[i];
      const beyond = where < line.x[0] || where > line.x[line.x.length - 1];
      if (beyond && line.x[i] !== where) continue;
      const j = line.smooth ? nearest(line.smooth.x, where) : 0;
      const mean = line.smooth ? ` (mean ${short(line.smooth.y[j])})` : "";
      rows.push([line.colour, line.single ? "" : line.name, (value === null ? "not finite" : short(value)) + mean]);
      if (value !== null) {
        marks.append(svg("circle", {class: `dot l${line.colour % 8}`, cx: state.toX(line.x[i]), cy: state.toY(value),
                                    r: 3.5}));
      }
    }
    state.at = where;
    state.picture.append(marks);
    const axis = {step: "step ", tokens: "tokens ", seconds: ""}[view.axis];
    tell(figure, where, axis + onAxis(where), rows);
  }

  // Beside place x of a figure's picture: [colour, name, value] of several things.
  function tell(figure, x, head, rows) {
    const state = drawn.get(figure), tip = html("div", "tip"), box = figure.querySelector(".plot"), at = state.toX(x);
    tip.setAttribute("role", "status");
    tip.append(html("div", "dim", head));
    for (const [colour, name, value] of rows.slice(0, 16)) {
      const row = html("div");
      row.append(html("span", `swatch l${colour % 8}`), html("span", "what", name), html("span", "value", value));
      tip.append(row);
    }
    figure.append(tip);
    tip.style.top = `${box.offsetTop + 4}px`;
    if (at > state.width / 2) tip.style.right = `${figure.clientWidth - box.offsetLeft - at + 10}px`;
    else tip.style.left = `${box.offsetLeft + at + 10}px`;
  }

  function leave(figure) {
    for (const old of figure.querySelectorAll(".tip, .crosshair")) old.remove();
  }

  // Calls show(x) where the pointer is, and move(by) for keys.
  function watch(figure, show, move) {
    const plot = figure.querySelector(".plot");
    const under = event => {
      const state = drawn.get(figure);
      if (!state) return;
      const box = state.picture.getBoundingClientRect(), a = state.toX(0), b = state.toX(1);
      show(((event.clientX - box.left) * state.width / box.width - a) / (b - a));
    };
    plot.addEventListener("pointermove", under);
    plot.addEventListener("pointerdown", under);
    plot.addEventListener("pointerleave", () => leave(figure));
    plot.addEventListener("focusout", () => leave(figure));
    plot.addEventListener("keydown", event => {
      const by = {ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity}[event.key];
      if (event.key === "Escape") leave(figure);
      if (!by || !drawn.has(figure)) return;
      event.preventDefault();
      move(by);
    });
  }

  function watchChart(figure) {
    watch(figure, x => point(figure, x), by => {
      const state = drawn.get(figure), xs = state.lines[0].x;
      const now = state.at < 0 ? (by > 0 ? -1 : xs.length) : nearest(xs, state.at);
      point(figure, xs[Math.min(Math.max(now + by, 0), xs.length - 1)]);
    });
    for (const button of figure.querySelectorAll("button")) {
      button.addEventListener("click", () => {
        if (button.dataset.do === "log") {
          figure.dataset.log = button.getAttribute("aria-pressed") === "true" ? "no" : "yes";
        } else {
          button.setAttribute("aria-pressed", String(figure.classList.toggle("large")));
        }
        draw(figure);
      });
    }
  }

  // ------------------------------------------------------------------ the time split

  function drawSplit(figure) {
    const {edges, kinds} = data.split, plot = figure.querySelector(".plot"), width = Math.max(plot.clientWidth, 200);
    const height = 220, left = 42, names = Object.keys(kinds), first = edges[0], last = edges[edges.length - 1];
    leave(figure);
    const toX = x => left + (x - first) / (last - first || 1) * (width - left - MARGIN.right);
    const toY = share => height - MARGIN.bottom - share * (height - MARGIN.top - MARGIN.bottom);
    const picture = svg("svg", {width, height, viewBox: `0 0 ${width} ${height}`, role: "img", tabindex: 0,
                                "aria-label": `Shares of the time. ${figure.querySelector(".summary").textContent}`});
    for (const share of [0, 0.25, 0.5, 0.75, 1]) {
      const y = toY(share);
      picture.append(svg("line", {class: "gridline", x1: left, x2: width - MARGIN.right, y1: y, y2: y}),
                     svg("text", {x: left - 5, y: y + 4, "text-anchor": "end"}, `${share * 100} %`));
    }
    for (let i = 0; i + 1 < edges.length; i++) {
      const total = names.reduce((sum, name) => sum + kinds[name][i], 0);
      let below = 0;
      names.forEach((name, number) => {
        const share = total > 0 ? kinds[name][i] / total : 0, x = toX(edges[i]);
        if (share > 0) {
          picture.append(svg("rect", {class: `dot l${number % 8}`, x, width: Math.max(toX(edges[i + 1]) - x - 0.4, 0.6),
                                      y: toY(below + share), height: toY(below) - toY(below + share)}));
        }
        below += share;
      });
    }
    for (const value of ticks(first, last, Math.max(2, Math.floor((width - left) / 60)))) {
      if (value !== Math.round(value)) continue;
      const x = toX(value), anchor = x > width - 30 ? "end" : "middle";
      const label = value < 1e5 ? value.toLocaleString("en") : short(value);
      picture.append(svg("text", {x, y: height - 5, "text-anchor": anchor}, label));
    }
    plot.replaceChildren(picture);
    drawn.set(figure, {picture, width, toX, at: -1});
  }

  function pointSplit(figure, i) {
    const {edges, kinds} = data.split, state = drawn.get(figure), names = Object.keys(kinds);
    leave(figure);
    i = Math.min(Math.max(i, 0), edges.length - 2);
    state.at = i;
    const total = names.reduce((sum, name) => sum + kinds[name][i], 0);
    const [begin, end] = [edges[i] + 1, edges[i + 1]].map(step => step.toLocaleString("en"));
    const rows = names.map((name, number) => [number, name, kinds[name][i]]).filter(row => row[2]).map(
      ([number, name, seconds]) => [number, name, `${duration(seconds)}, ${(100 * seconds / total).toFixed(1)} %`]);
    tell(figure, (edges[i] + edges[i + 1]) / 2, `steps ${begin} to ${end}`, rows);
  }

  // ------------------------------------------------------------------ samples: one step at a time

  for (const stream of document.querySelectorAll(".stream")) {
    const steps = [...stream.querySelectorAll("details.step")];
    if (steps.length < 2) continue;
    const slider = html("div", "slider"), label = html("label"), range = html("input"), said = html("output");
    range.type = "range";
    range.min = 0;
    range.max = steps.length - 1;
    range.value = range.max;
    label.append("step ", said);
    label.htmlFor = range.id = `slider-${stream.dataset.number}`;
    const show = () => steps.forEach((step, i) => {
      step.hidden = i !== Number(range.value);
      if (!step.hidden) {
        step.open = true;
        said.textContent = Number(step.dataset.step).toLocaleString("en");
        range.setAttribute("aria-valuetext", `step ${said.textContent}`);
      }
    });
    range.addEventListener("input", show);
    slider.append(label, range);
    stream.querySelector("h3").after(slider);
    stream.classList.add("slid");
    show();
  }

  // ------------------------------------------------------------------ the whole page

  const split = document.querySelector("figure[data-split]");
  const drawAll = () => { figures.forEach(draw); if (split) drawSplit(split); };
  figures.forEach(watchChart);
  if (split) {
    watch(split, x => pointSplit(split, data.split.edges.filter(edge => edge < x).length - 1),
          by => pointSplit(split, drawn.get(split).at + by));
  }
  for (const input of document.querySelectorAll(".tools input")) {
    input.disabled = false;
    input.addEventListener("change", () => {
      if (input.name === "axis") view.axis = input.value;
      if (input.name === "log") {
        view.log = input.checked;
        for (const figure of figures) delete figure.dataset.log;
      }
      if (input.name === "smooth") view.smooth = input.checked;
      if (input.name === "run") view.hidden[input.checked ? "delete" : "add"](Number(input.value));
      drawAll();
    });
  }
  drawAll();
  let width = document.body.clientWidth;
  new ResizeObserver(() => requestAnimationFrame(() => {
    if (document.body.clientWidth !== width) {
      width = document.body.clientWidth;
      drawAll();
    }
  })).observe(document.body);
})();
