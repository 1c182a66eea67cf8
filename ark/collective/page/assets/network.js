// The drawing of the network. Each direction of a link is a curve. Flows and trees are drawn over
// the curves on a canvas.
const Network = {
  scale: 1, points: [], curves: [], byPair: new Map(), paths: [], nodes: [],

  build() {
    const stage = $("stage").getBoundingClientRect();
    const xs = DATA.nodes.map((n) => n.x), ys = DATA.nodes.map((n) => n.y);
    const [left, right] = [Math.min(...xs), Math.max(...xs)];
    const [top, bottom] = [Math.min(...ys), Math.max(...ys)];
    const pad = 46;
    this.scale = Math.min((stage.width - 2 * pad) / (right - left || 1),
      (stage.height - 2 * pad - 26) / (bottom - top || 1), 230);
    this.points = DATA.nodes.map((n) => [
      stage.width / 2 + (n.x - (left + right) / 2) * this.scale,
      stage.height / 2 - 10 + (n.y - (top + bottom) / 2) * this.scale]);
    this.size = Math.max(5, Math.min(17, this.scale * 0.2));
    const svg = $("links");
    svg.replaceChildren();
    svg.setAttribute("viewBox", `0 0 ${stage.width} ${stage.height}`);
    const most = Math.max(...DATA.links.map((l) => l[2]));
    this.byPair.clear();
    this.curves = DATA.links.map(([a, b], i) => {
      this.byPair.set(`${a},${b}`, i);
      return this.curve(a, b, 0.07);
    });
    const hits = element("g", {});
    this.paths = DATA.links.map(([a, b, gbps], i) => {
      const [p, c, q] = this.curves[i];
      const d = `M${p}Q${c} ${q}`;
      const width = 1.1 + 3.6 * Math.sqrt(gbps / most) * Math.min(1, this.size / 13);
      const path = element("path", { class: "link", d, "stroke-width": width.toFixed(2) }, svg);
      const hit = element("path", { class: "hit", d }, hits);
      hit.addEventListener("mousemove", (event) => this.tip(event, i));
      hit.addEventListener("mouseleave", hideTip);
      return path;
    });
    svg.appendChild(hits);
    const above = $("nodes");
    above.replaceChildren();
    above.setAttribute("viewBox", svg.getAttribute("viewBox"));
    this.nodes = DATA.nodes.map((node, i) => this.node(above, node, this.points[i]));
    this.canvas = fitCanvas($("flows"));
  },

  curve(a, b, bend) {
    const p = this.points[a], q = this.points[b];
    const dx = q[0] - p[0], dy = q[1] - p[1];
    return [p, [(p[0] + q[0]) / 2 - dy * bend, (p[1] + q[1]) / 2 + dx * bend], q];
  },

  node(svg, node, [x, y]) {
    const group = element("g", { class: `node ${node.rank ? "rank" : "switch"}` }, svg);
    const s = this.size, fill = colour("rank");
    const shape = node.rank
      ? element("circle", { cx: x, cy: y, r: s, fill }, group)
      : element("rect",
        { x: x - s * 0.95, y: y - s * 0.8, width: s * 1.9, height: s * 1.6, rx: 4, fill }, group);
    const font = Math.min(s * 0.9, (s * 3) / Math.max(2, node.id.length));
    // A name that does not fit inside its node is drawn above it, if there is room between nodes.
    if (font > 7) {
      element("text", { x, y: y + 0.5, "font-size": font }, group).textContent = node.id;
    } else if (this.scale > 26) {
      element("text", { x, y: y - s - 5, "font-size": 9 }, group).textContent = node.id;
    }
    group.addEventListener("mousemove", (event) => showTip(event,
      `<b>${escapeText(node.id)}</b> <span>${node.rank ? "rank" : "switch"}</span>`));
    group.addEventListener("mouseleave", hideTip);
    return shape;
  },

  tip(event, i) {
    const [a, b, gbps] = DATA.links[i], run = State.run;
    const name = (n) => escapeText(DATA.nodes[n].id);
    showTip(event, `<b>${name(a)} \u2192 ${name(b)}</b> ` +
      `<span>${Number(gbps.toPrecision(4))} GB/s</span><br>` +
      `${bytesText(run.bytes[i])} carried<br>busy ${(100 * run.busy[i]).toFixed(1)}% of the time`);
  },

  paint() {
    const load = State.mode === "load";
    const order = State.run.busy;
    this.paths.forEach((path, i) => {
      path.setAttribute("stroke", load ? rampColour(order[i]) : colour("link"));
      path.setAttribute("stroke-opacity", load ? (order[i] > 0 ? 0.95 : 0.5) : 0.75);
    });
    this.nodes.forEach((shape, i) => {
      const rank = DATA.nodes[i].rank;
      const root = State.mode === "tree" && Trees.current && Trees.current.root === i;
      shape.setAttribute("fill", root ? colour("text") : colour(rank ? "rank" : "switch"));
      shape.setAttribute("stroke", root ? colour("text") : colour(rank ? "rim" : "switchRim"));
      const label = shape.parentNode.querySelector("text");
      if (label) label.style.fill = root ? colour("ground") : "";
    });
    this.legend();
    this.overlay();
  },

  legend() {
    const legend = $("legend");
    if (State.mode === "load") {
      const stops = rampStops().map(([at, c]) => `rgb(${c}) ${100 * at}%`).join(",");
      const ramp = `background:linear-gradient(90deg,${stops})`;
      legend.innerHTML = `<div class="ramp" style="${ramp}"></div>` +
        `<div class="ends"><span>idle</span><span>link busy</span><span>all the time</span></div>`;
    } else if (State.mode === "tree" && Trees.current) {
      const count = Trees.current.depth;
      const shown = Math.min(count, 10);
      legend.innerHTML = `<div class="steps">${Array.from({ length: shown }, (_, s) =>
        `<span><i style="background:${stepColour(s, count)}"></i>hop ${s + 1}</span>`).join("")}` +
        `${count > shown ? `<span>\u2026 ${count}</span>` : ""}</div>`;
    } else {
      legend.textContent = DATA.rooted ? "Dots have the colour of the chunk that they carry."
        : "Dots have the colour of the rank whose share they carry.";
    }
  },

  overlay() {
    const { context, width, height } = this.canvas;
    context.clearRect(0, 0, width, height);
    if (State.mode === "tree") this.drawTree(context);
    else if (State.mode === "flow") this.drawFlows(context);
  },

  trace(context, [p, c, q]) {
    context.beginPath();
    context.moveTo(...p);
    context.quadraticCurveTo(...c, ...q);
    context.stroke();
  },

  at([p, c, q], t) {
    const u = 1 - t;
    return [0, 1].map((k) => u * u * p[k] + 2 * u * t * c[k] + t * t * q[k]);
  },

  hops(route) {
    const result = [];
    for (let i = 1; i < route.length; i++) {
      result.push(this.curves[this.byPair.get(`${route[i - 1]},${route[i]}`)]);
    }
    return result;
  },

  drawFlows(context) {
    const run = State.run, now = State.time;
    const busy = new Map();
    const active = run.events.filter((e) => e[EVENT.start] <= now && now < e[EVENT.end]);
    for (const e of active) {
      const route = run.routes[e[EVENT.route]];
      for (let i = 1; i < route.length; i++) {
        const link = this.byPair.get(`${route[i - 1]},${route[i]}`);
        busy.set(link, (busy.get(link) || 0) + 1);
      }
    }
    context.lineCap = "round";
    for (const [link, flows] of busy) {
      context.strokeStyle = colour("accent");
      context.globalAlpha = Math.min(0.65, 0.22 + 0.05 * flows);
      context.lineWidth = Math.min(5, 1.6 + 0.3 * flows);
      this.trace(context, this.curves[link]);
    }
    const every = Math.max(1, Math.ceil(active.length / 420));
    active.forEach((e, index) => {
      if (index % every) return;
      const hops = this.hops(run.routes[e[EVENT.route]]);
      context.fillStyle = ownerColour(Trees.ownerOf(e));
      const phase = ((now / run.time) * 26 + (index * 0.381)) % 1;
      for (let k = 0; k < 2; k++) {
        const t = ((phase + k / 2) % 1) * hops.length;
        const hop = Math.min(hops.length - 1, Math.floor(t));
        const [x, y] = this.at(hops[hop], t - hop);
        context.globalAlpha = 0.95;
        context.beginPath();
        context.arc(x, y, Math.max(2, this.size * 0.21), 0, 7);
        context.fill();
      }
    });
    context.globalAlpha = 1;
  },

  drawTree(context) {
    const tree = Trees.current;
    if (!tree) return;
    context.lineCap = "round";
    for (const edge of [...tree.edges].reverse()) {
      const hops = this.hops(State.run.routes[edge.route]);
      context.strokeStyle = context.fillStyle = stepColour(edge.depth, tree.depth);
      context.globalAlpha = 0.9;
      context.lineWidth = Math.max(2.2, this.size * 0.24);
      hops.forEach((hop) => this.trace(context, hop));
      const last = hops[hops.length - 1];
      const length = Math.hypot(last[2][0] - last[0][0], last[2][1] - last[0][1]) || 1;
      const stop = Math.max(0.4, 1 - (this.size + 2) / length);
      this.arrow(context, this.at(last, stop - 0.02), this.at(last, stop));
    }
    context.globalAlpha = 1;
  },

  arrow(context, from, to) {
    const angle = Math.atan2(to[1] - from[1], to[0] - from[0]), s = Math.max(5, this.size * 0.6);
    context.beginPath();
    context.moveTo(...to);
    context.lineTo(to[0] - s * Math.cos(angle - 0.45), to[1] - s * Math.sin(angle - 0.45));
    context.lineTo(to[0] - s * Math.cos(angle + 0.45), to[1] - s * Math.sin(angle + 0.45));
    context.fill();
  },
};
