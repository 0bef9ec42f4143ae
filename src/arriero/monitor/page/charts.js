"use strict";
// Charts in SVG that share one view: what the x axis counts, the part that is shown, smoothing, the cursor.
// A series: {key, name, tone, dash, xs: {step, tokens, hours}, ys, scale, marks, lost}; of ys, null is no value and "nan"
// one that isn't finite. An event: {xs: {step, tokens, hours} of one number each, tone, sign, full, text()}.

const put = (node, attributes, inside) => {
  for (const [name, value] of Object.entries(attributes ?? {})) if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : value);
  node.append(...inside.flat().filter(one => one !== null && one !== undefined));
  return node;
};
const make = (name, attributes, ...inside) => put(document.createElement(name), attributes, inside);
const svg = (name, attributes, ...inside) => put(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, inside);
const isNumber = value => typeof value === "number";

function short(value, digits = 4) {
  const size = Math.abs(value);
  for (const [suffix, scale] of [["T", 1e12], ["B", 1e9], ["M", 1e6], ["k", 1e3]]) {
    if (size >= scale && size >= 1e4) return Number((value / scale).toPrecision(digits)) + suffix;
  }
  if (size && size < 1e-3) return value.toExponential(digits - 1).replace(/\.?0+e/, "e").replace("e-", "e−");
  return String(Number(value.toPrecision(digits))).replace("-", "−");
}

function ticks(low, high, count) {
  const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].find(each => each * power >= rough * 0.999) * power;
  const found = [];
  for (let n = Math.ceil(low / step - 1e-9); n * step <= high + step * 1e-9; n++) found.push(Number((n * step).toPrecision(12)));
  return found;
}

function logTicks(low, high) {
  const decades = Math.log10(high / low), found = [];
  if (decades < 0.7) return ticks(low, high, 4);
  const every = Math.ceil(decades / 6);
  for (let n = Math.floor(Math.log10(low)); n <= Math.ceil(Math.log10(high)); n++) {
    if (n % every === 0) for (const each of decades < 2.5 ? [1, 2, 5] : [1]) found.push(each * 10 ** n);
  }
  return found.filter(value => value >= low && value <= high);
}

// An exponential mean without the start's bias towards zero, as TensorBoard draws it; what isn't finite breaks it.
function smoothed(ys, weight) {
  let mean = 0, sum = 0;
  return ys.map(y => {
    if (!isNumber(y)) { if (y === "nan") mean = sum = 0; return y; }
    mean = mean * weight + y * (1 - weight);
    sum = sum * weight + 1 - weight;
    return mean / sum;
  });
}

class Board {
  constructor(text) {
    this.text = text;
    this.by = "step"; this.range = null; this.smooth = 0; this.log = false;
    this.charts = []; this.events = []; this.whole = [0, 1];
    this.watcher = new ResizeObserver(seen => { for (const one of seen) one.target.chart.draw(); });
  }
  span() {
    const [low, high] = this.range ?? this.whole;
    return low < high ? [low, high] : [low - 0.5, high + 0.5];
  }
  measure() {
    let low = Infinity, high = -Infinity;
    for (const chart of this.charts) for (const series of chart.spec.series ?? []) for (const x of series.xs[this.by]) {
      if (isNumber(x)) { low = Math.min(low, x); high = Math.max(high, x); }
    }
    for (const event of this.events) { low = Math.min(low, event.xs[this.by]); high = Math.max(high, event.xs[this.by]); }
    this.whole = low <= high ? [low, high] : [0, 1];
  }
  set(changes) {
    Object.assign(this, changes);
    if (changes.by) { this.range = null; this.measure(); }
    this.redraw();
  }
  zoom(low, high) {
    const [first, last] = this.whole;
    const wide = Math.max(high - low, (last - first) * 1e-6), start = Math.max(first, Math.min(low, last - wide));
    this.range = wide >= last - first ? null : [start, start + wide];
    this.redraw();
  }
  redraw() { for (const chart of this.charts) chart.draw(); this.changed?.(); }
  point(x, from) { for (const chart of this.charts) if (chart !== from) chart.cross(x); }
}

class Chart {
  constructor(board, spec) {
    this.board = board;
    this.off = new Set();
    this.title = make("h3"); this.unit = make("span", {class: "unit"}); this.legend = make("ul", {class: "legend"});
    this.plot = svg("svg", {class: "plot", tabindex: 0, role: "img"});
    this.tip = make("div", {class: "tip", hidden: true});
    this.numbers = make("details", {}, make("summary"), make("div", {class: "scroll", tabindex: 0}));
    this.figure = make("figure", {id: `chart-${spec.id}`, class: spec.broad ? "broad" : null}, make("figcaption", {}, this.title, this.unit, this.legend), this.plot, this.tip, this.numbers);
    this.numbers.addEventListener("toggle", () => this.table());
    this.listen();
    this.figure.chart = this;
    board.watcher.observe(this.figure);
    this.take(spec);
  }

  take(spec) {
    this.spec = spec;
    this.title.textContent = spec.title;
    this.unit.textContent = spec.unit ?? "";
    this.numbers.firstChild.textContent = this.board.text("numbers");
    this.plot.setAttribute("aria-label", `${spec.title}. ${this.summary()} ${this.board.text("keysOfChart")}`);
    const several = spec.series?.length > 1;
    this.legend.replaceChildren(...(spec.series ?? []).map(series => {
      const button = make("button", {type: "button", "aria-pressed": String(!this.off.has(series.name))},
        svg("svg", {viewBox: "0 0 24 10", "aria-hidden": "true", class: `t${series.tone}`}, svg("path", {d: "M0,5H24", class: "curve", "stroke-dasharray": series.dash || null})),
        `${series.name}${series.lost ? "" : " " + this.spell(series.ys.findLast(isNumber))}`);
      button.addEventListener("click", () => {
        if (!this.off.delete(series.name)) this.off.add(series.name);
        button.setAttribute("aria-pressed", String(!this.off.has(series.name)));
        this.draw();
      });
      return make("li", {}, several ? button : `${this.board.text("latest")} ${this.spell(series.ys.findLast(isNumber))}`);
    }), ...(spec.levels ?? []).map(level => make("li", {}, svg("svg", {viewBox: "0 0 24 10", "aria-hidden": "true", style: "display:inline"}, svg("path", {d: "M0,5H24", class: "level"})), `${level.name} ${this.spell(level.value)}`)));
    this.table();
  }

  spell(value) { return isNumber(value) ? this.spec.format ? this.spec.format(value) : short(value * (this.spec.scale ?? 1)) : "–"; }
  shown() { return (this.spec.series ?? []).filter(series => !this.off.has(series.name)); }

  summary() {
    if (this.spec.lanes) return this.spec.lanes.map(lane => `${lane.name}: ${lane.events.length}`).join("; ");
    return this.spec.series.filter(series => !series.lost).map(series => `${series.name}: ${this.spell(series.ys.find(isNumber))} → ${this.spell(series.ys.findLast(isNumber))}`).join("; ") + ".";
  }

  draw() {
    const wide = this.figure.clientWidth - 26;
    if (wide < 50) return;
    const lanes = this.spec.lanes, tall = lanes ? lanes.length * 24 + 24 : this.spec.broad ? 320 : 220;
    const [low, high] = this.board.span();
    const area = this.area = {top: lanes ? 2 : 12, bottom: tall - 22, right: wide - 10, left: 0};
    const rows = lanes ? [] : this.rows(area);
    area.left = lanes ? 14 + 7 * Math.max(...lanes.map(lane => [...lane.name].reduce((sum, one) => sum + (one > "⺀" ? 1.8 : 1), 0))) : 12 + 6.9 * Math.max(1, ...rows.map(([, label]) => label.length));
    const x = this.x = value => area.left + (value - low) / (high - low) * (area.right - area.left);
    const parts = [svg("defs", {}, svg("clipPath", {id: `clip-${this.spec.id}`}, svg("rect", {x: area.left - 4, y: area.top - 8, width: area.right - area.left + 8, height: area.bottom - area.top + 16})))];
    for (const [y, label] of rows) parts.push(svg("path", {class: "grid", d: `M${area.left},${y}H${area.right}`}), svg("text", {x: area.left - 7, y: y + 4, "text-anchor": "end"}, label));
    for (const value of ticks(low, high, Math.max(2, wide / 80))) {
      if (this.board.by === "step" && !Number.isInteger(value)) continue;
      parts.push(svg("path", {class: "axis", d: `M${x(value)},${area.bottom}v4`}), svg("text", {x: x(value), y: area.bottom + 17, "text-anchor": "middle"}, short(value, 6)));
    }
    parts.push(svg("path", {class: "axis", d: `M${area.left},${area.bottom}H${area.right}`}));
    const inside = svg("g", {"clip-path": `url(#clip-${this.spec.id})`});
    inside.append(...lanes ? this.lanes(parts) : this.lines());
    this.over = svg("g", {"pointer-events": "none"});
    this.plot.setAttribute("height", tall);
    this.plot.setAttribute("viewBox", `0 0 ${wide} ${tall}`);
    this.plot.replaceChildren(...parts, inside, this.over);
    this.tip.hidden = true;
    this.table();
  }

  // Where the y axis has its lines, with their labels; sets this.y.
  rows(area) {
    const [from, to] = this.board.span(), log = this.board.log, bent = log ? Math.log10 : value => value, scale = this.spec.scale ?? 1;
    let low = Infinity, high = -Infinity;
    const widen = value => { if (!log || value > 0) { low = Math.min(low, value); high = Math.max(high, value); } };
    const counted = this.shown().some(series => !series.lost) ? this.shown().filter(series => !series.lost) : this.shown();
    for (const series of counted) series.ys.forEach((y, n) => { const at = series.xs[this.board.by][n]; if (isNumber(y) && at >= from && at <= to) widen(y * scale); });
    if (low > high) { this.y = this.above = null; return []; }
    const lost = this.shown().flatMap(series => series.lost ? series.ys.filter((y, n) => isNumber(y) && series.xs[this.board.by][n] >= from && series.xs[this.board.by][n] <= to) : []);
    this.above = null;
    if (this.spec.settles && !this.board.range) {
      // A run falls from ln V within its first steps, and would press all the rest onto the axis.
      const late = counted.flatMap(series => series.ys.filter((y, n) => isNumber(y) && series.xs[this.board.by][n] > from + (to - from) * 0.05));
      const highest = Math.max(...late) * scale;
      if (highest > low && (bent(highest) - bent(low)) < 0.7 * (bent(high) - bent(low))) { this.above = high; high = highest; }
    }
    const spike = Math.max(...lost) * scale;
    if (spike > high && high > low) this.above = Math.max(spike, this.above ?? spike);
    for (const level of this.spec.levels ?? []) if (level.always || (level.value * scale < high && level.value * scale > low)) widen(level.value * scale);
    if (this.spec.zero && !log) low = Math.min(low, 0);
    if (low === high) { low -= Math.abs(low) * 0.05 || 0.5; high += Math.abs(high) * 0.05 || 0.5; if (log) low = Math.max(low, high / 2); }
    const edge = (bent(high) - bent(low)) * 0.04, bottom = this.spec.zero && !log && low === 0 ? 0 : bent(low) - edge, top = bent(high) + edge;
    this.y = value => { const at = value * scale; return log && at <= 0 ? null : area.bottom - (bent(at) - bottom) / (top - bottom) * (area.bottom - area.top); };
    const values = log ? logTicks(10 ** bottom, 10 ** top) : ticks(bottom, top, this.spec.broad ? 6 : 4);
    return values.map(value => [area.bottom - (bent(value) - bottom) / (top - bottom) * (area.bottom - area.top), this.spec.format ? this.spec.format(value / scale) : short(value)]);
  }

  lines() {
    const {by, smooth, events} = this.board, [low, high] = this.board.span(), {top, bottom, left, right} = this.area, found = [];
    if (!this.y) found.push(svg("text", {x: (left + right) / 2, y: (top + bottom) / 2, "text-anchor": "middle"}, this.board.text("nothing")));
    for (const event of events) {
      const at = event.xs[by];
      if (at < low || at > high || event.plain) continue;
      found.push(event.full ? svg("path", {class: `when ${event.tone}`, d: `M${this.x(at)},${top}V${bottom}`}) : svg("path", {class: `tick ${event.tone}`, d: `M${this.x(at)},${bottom}v-7`}));
    }
    if (this.above) found.push(svg("text", {x: right - 6, y: top + 2, "text-anchor": "end"}, this.board.text("above")(short(this.above))));
    for (const level of this.y ? this.spec.levels ?? [] : []) found.push(svg("path", {class: "level", d: `M${left},${this.y(level.value)}H${right}`}));
    for (const series of this.shown()) {
      const xs = series.xs[by], tone = `t${series.tone}`, bends = smooth > 0 && !series.marks && !series.lost && series.ys.length > 2;
      const path = ys => {
        let line = "", pen = false;
        for (let n = 0; n < ys.length; n++) {
          if (ys[n] === null && xs[n] !== null) continue;
          const y = isNumber(ys[n]) && this.y ? this.y(ys[n]) : null;
          if (y === null) { pen = false; continue; }
          line += `${pen ? "L" : "M"}${this.x(xs[n]).toFixed(1)},${y.toFixed(1)}${pen ? "" : "h0"}`;
          pen = true;
        }
        return line;
      };
      found.push(svg("path", {class: `curve ${tone}${bends ? " raw" : ""}${series.lost ? " lost" : ""}`, d: path(series.ys), "stroke-dasharray": series.dash || null, "stroke-linecap": series.dash ? null : "round"}));
      if (bends) found.push(svg("path", {class: `curve ${tone}`, d: path(smoothed(series.ys, smooth)), "stroke-dasharray": series.dash || null}));
      const seen = xs.filter(x => x >= low && x <= high).length;
      series.ys.forEach((y, n) => {
        if (xs[n] === null || xs[n] < low || xs[n] > high) return;
        if (isNumber(y) && this.y && !series.lost && (seen < 40 || series.marks && seen < 150) && this.y(y) !== null) found.push(svg("circle", {class: `dot ${tone}`, cx: this.x(xs[n]), cy: this.y(y), r: seen < 40 ? 3.25 : 2.25}));
        if (y === "nan") found.push(svg("path", {class: "sign wrong", d: sign("cross", this.x(xs[n]), top)}));
      });
    }
    return found;
  }

  lanes(behind) {
    const [low, high] = this.board.span(), found = [];
    this.spots = [];
    this.spec.lanes.forEach((lane, row) => {
      const y = this.area.top + 12 + row * 24;
      behind.push(svg("path", {class: "grid", d: `M${this.area.left},${y}H${this.area.right}`}), svg("text", {x: this.area.left - 9, y: y + 4, "text-anchor": "end"}, lane.name));
      for (const event of lane.events) {
        const x = event.xs[this.board.by];
        if (x < low || x > high) continue;
        this.spots.push({x: this.x(x), y, event});
        found.push(svg("path", {class: `${event.sign === "cross" ? "sign" : "mark"} ${event.tone}`, d: sign(event.sign, this.x(x), y)}));
      }
    });
    this.spots.sort((one, other) => one.x - other.x);
    return found;
  }

  // The points nearest to a place in pixels: {x, hits: [[series, n], …]}.
  nearest(place) {
    const by = this.board.by, [low, high] = this.board.span(), found = [];
    for (const series of this.shown()) {
      if (series.lost) continue;
      const xs = series.xs[by];
      let best = -1, least = Infinity;
      for (let n = 0; n < xs.length; n++) {
        const far = Math.abs(this.x(xs[n]) - place);
        if (series.ys[n] !== null && far < least && xs[n] >= low && xs[n] <= high) { best = n; least = far; }
      }
      if (best >= 0) found.push([series, best, least]);
    }
    if (!found.length) return null;
    const [first, n] = found.reduce((one, other) => other[2] < one[2] ? other : one), x = first.xs[by][n];
    return {x, hits: found.filter(([series, m]) => Math.abs(this.x(series.xs[by][m]) - this.x(x)) < 6)};
  }

  cross(x) {
    if (!this.over) return;
    const [low, high] = this.board.span();
    this.over.replaceChildren(...x === null || x < low || x > high ? [] : [svg("path", {class: "cross", d: `M${this.x(x)},${this.area.top}V${this.area.bottom}`})]);
  }

  // Show what is at a place in pixels; true where there was something.
  show(place, height) {
    if (this.spec.lanes) return this.showSpot(this.spots.reduce((best, spot) => Math.hypot(spot.x - place, spot.y - height) < Math.hypot(best.x - place, best.y - height) ? spot : best, {x: 1e9, y: 1e9}));
    const near = this.y && this.nearest(place);
    if (!near) return false;
    const {board} = this, by = board.by;
    this.at = near.x;
    this.cross(near.x);
    const lines = near.hits.map(([series, n]) => {
      const y = series.ys[n];
      if (isNumber(y) && this.y(y) !== null) this.over.append(svg("circle", {class: `dot t${series.tone}`, cx: this.x(series.xs[by][n]), cy: this.y(y), r: 4}));
      return make("div", {}, make("i", {class: `t${series.tone}`}), `${series.name}: ${y === "nan" ? board.text("notFinite") : this.spec.exact ? this.spec.exact(y) : this.spell(y)}`);
    });
    const told = board.events.filter(event => !event.plain && Math.abs(this.x(event.xs[by]) - this.x(near.x)) < 4);
    lines.push(...told.slice(0, 3).map(event => make("div", {class: event.tone === "wrong" ? "bad" : null}, event.text())));
    this.say(make("strong", {}, `${board.text(by)} ${by === "hours" ? `${short(near.x)} ${board.timeUnit}` : short(near.x, 7)}`), ...lines);
    this.place(this.x(near.x));
    board.point(near.x, this);
    return true;
  }

  showSpot(spot) {
    if (!spot.event || !this.spots.includes(spot)) return false;
    this.at = spot;
    this.cross(spot.event.xs[this.board.by]);
    this.say(make("strong", {}, spot.event.name()), make("div", {}, spot.event.text()));
    this.place(spot.x);
    this.board.point(spot.event.xs[this.board.by], this);
    return true;
  }

  say(...lines) { this.tip.replaceChildren(...lines); this.tip.hidden = false; }
  place(x) {
    const side = x > this.figure.clientWidth / 2;
    this.tip.style.left = side ? "auto" : `${x + 28}px`;
    this.tip.style.right = side ? `${this.figure.clientWidth - x}px` : "auto";
    this.tip.style.top = `${this.plot.getBoundingClientRect().top - this.figure.getBoundingClientRect().top + 8}px`;
  }
  leave() { this.tip.hidden = true; this.at = null; this.cross(null); this.board.point(null, this); }

  listen() {
    const {plot, board} = this;
    let from = null;
    const inPlot = event => event.clientX - plot.getBoundingClientRect().left;
    const value = x => { const [low, high] = board.span(); return low + (Math.min(Math.max(x, this.area.left), this.area.right) - this.area.left) / (this.area.right - this.area.left) * (high - low); };
    plot.addEventListener("pointerdown", event => { if (event.button === 0) { from = inPlot(event); plot.setPointerCapture(event.pointerId); } });
    plot.addEventListener("pointermove", event => {
      const x = inPlot(event);
      if (from !== null && Math.abs(x - from) > 5) {
        this.leave();
        const [left, right] = [from, x].sort((a, b) => a - b).map(one => Math.min(Math.max(one, this.area.left), this.area.right));
        this.over.replaceChildren(svg("rect", {class: "chosen", x: left, y: this.area.top, width: right - left, height: this.area.bottom - this.area.top}));
      } else if (!this.show(x, event.clientY - plot.getBoundingClientRect().top)) this.leave();
    });
    plot.addEventListener("pointerup", event => {
      const x = inPlot(event);
      if (from !== null && Math.abs(x - from) > 5) { const [low, high] = [value(from), value(x)].sort((a, b) => a - b); if (low < high) board.zoom(low, high); }
      from = null;
    });
    plot.addEventListener("pointercancel", () => { from = null; this.leave(); });
    plot.addEventListener("pointerleave", () => { if (from === null) this.leave(); });
    plot.addEventListener("dblclick", () => board.set({range: null}));
    plot.addEventListener("blur", () => this.leave());
    plot.addEventListener("wheel", event => { if (event.ctrlKey || event.metaKey) { event.preventDefault(); this.scale(event.deltaY < 0 ? 0.7 : 1 / 0.7, value(inPlot(event))); } }, {passive: false});
    plot.addEventListener("keydown", event => this.key(event));
  }

  scale(factor, about) {
    const [low, high] = this.board.span();
    this.board.zoom(about - (about - low) * factor, about + (high - about) * factor);
  }

  key(event) {
    const {board} = this, [low, high] = board.span(), middle = isNumber(this.at) ? this.at : (low + high) / 2;
    const turn = {ArrowLeft: -1, ArrowRight: 1}[event.key];
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (turn && event.shiftKey) board.zoom(low + turn * (high - low) / 4, high + turn * (high - low) / 4);
    else if (turn || event.key === "Home" || event.key === "End") this.walk(turn ?? (event.key === "Home" ? -Infinity : Infinity));
    else if (event.key === "+" || event.key === "=") this.scale(0.5, middle);
    else if (event.key === "-") this.scale(2, middle);
    else if (event.key === "0" || event.key === "Escape") board.set({range: null});
    else return;
    event.preventDefault();
  }

  walk(turn) {
    const by = this.board.by, [low, high] = this.board.span();
    const places = this.spec.lanes ? this.spots : [...new Set(this.shown().flatMap(series => series.lost ? [] : series.xs[by].filter((x, n) => series.ys[n] !== null && x >= low && x <= high)))].sort((a, b) => a - b);
    if (!places.length) return;
    const now = places.indexOf(this.at);
    const next = places[Math.max(0, Math.min(places.length - 1, now < 0 && Math.abs(turn) === 1 ? 0 : Math.max(now, 0) + turn))];
    if (this.spec.lanes) this.showSpot(next); else { this.show(this.x(next)); }
    this.board.said([...this.tip.children].map(one => one.textContent).join("; "));
  }

  // The numbers behind the chart, of the part that is shown, by the keys of metrics.jsonl.
  table() {
    const box = this.numbers.lastChild;
    if (!this.numbers.open) { box.replaceChildren(); return; }
    if (this.spec.lanes) { box.replaceChildren(this.spec.table()); return; }
    const [low, high] = this.board.span(), rows = new Map(), all = this.spec.series.filter(series => !series.lost);
    all.forEach((series, column) => series.ys.forEach((y, n) => {
      const x = series.xs[this.board.by][n];
      if (y === null || x < low || x > high) return;
      const step = series.xs.step[n];
      if (!rows.has(step)) rows.set(step, []);
      rows.get(step)[column] = y;
    }));
    const steps = [...rows.keys()].sort((a, b) => a - b), most = 500;
    box.replaceChildren(make("table", {},
      make("caption", {}, steps.length > most ? this.board.text("tableCut")(most, steps.length) : this.board.text("tableOf")),
      make("thead", {}, make("tr", {}, make("th", {class: "number", scope: "col"}, "step"), all.map(series => make("th", {class: "number", scope: "col"}, series.column ?? series.key)))),
      make("tbody", {}, steps.slice(0, most).map(step => make("tr", {}, make("th", {class: "number", scope: "row"}, String(step)), all.map((_, column) => {
        const y = rows.get(step)[column];
        return make("td", {class: "number"}, y === undefined ? "" : y === "nan" ? this.board.text("notFinite") : String(y));
      }))))));
  }
}

function sign(name, x, y) {
  if (name === "cross") return `M${x - 4.5},${y - 4.5}l9,9m0,-9l-9,9`;
  if (name === "diamond") return `M${x},${y - 6}l6,6l-6,6l-6,-6z`;
  if (name === "back") return `M${x + 4},${y - 6}v12l-9,-6z`;
  if (name === "on") return `M${x - 4},${y - 6}v12l9,-6z`;
  if (name === "square") return `M${x - 5},${y - 5}h10v10h-10z`;
  return `M${x - 5},${y}a5,5 0 1 0 10,0a5,5 0 1 0 -10,0z`;
}
