// The timeline: one row for each sending rank, one bar for each put. The cursor marks the time that
// the drawing of the network shows.
const Timeline = {
  bars: [], labels: 62, top: 22, hover: null, zoom: 1, from: 0,

  build() {
    const run = State.run, rows = DATA.ranks;
    const lanes = Array.from({ length: rows }, () => []);
    this.bars = [];
    this.zoom = 1;
    this.from = 0;
    for (const e of run.events) {
      const row = lanes[e[EVENT.rank]];
      let lane = row.findIndex((end) => end <= e[EVENT.start] + 1e-6);
      if (lane < 0) { lane = row.length; row.push(0); }
      row[lane] = e[EVENT.left];
      this.bars.push({ e, lane });
    }
    this.lanes = lanes.map((row) => Math.max(1, row.length));
    this.rowHeight = Math.max(14, Math.min(26, 520 / rows));
    const pen = document.createElement("canvas").getContext("2d");
    pen.font = "11px system-ui, sans-serif";
    const names = DATA.nodes.slice(0, rows).map((node) => pen.measureText(node.id).width);
    this.labels = Math.max(62, ...names.map((width) => Math.ceil(width) + 20));
    this.view = fitCanvas($("timeline"), this.top + rows * this.rowHeight + 6);
    $("timelineNote").textContent = run.shown < run.pieces
      ? `the first ${run.shown} of ${run.pieces} pieces of each chunk are drawn`
      : "a row for each sender, a bar for each put";
    this.show();
  },

  show() {
    $("zoom").textContent = `${this.zoom < 10 ? Number(this.zoom.toPrecision(2)) : Math.round(this.zoom)}\u00d7`;
    this.paintBars();
    this.paint();
  },

  // The length of the visible time. The visible time begins at `from`; its length is that of the
  // run divided by `zoom`.
  span() { return State.run.time / this.zoom; },

  move(from) {
    this.from = Math.max(0, Math.min(State.run.time - this.span(), from));
    this.show();
  },

  zoomTo(factor, around = this.from + this.span() / 2) {
    const share = (around - this.from) / this.span();
    this.zoom = Math.max(1, Math.min(256, this.zoom * factor));
    this.move(around - share * this.span());
  },

  x(time) {
    const width = this.view.width - this.labels - 12;
    return this.labels + ((time - this.from) / this.span()) * width;
  },

  time(x) {
    const width = this.view.width - this.labels - 12;
    const t = this.from + ((x - this.labels) / width) * this.span();
    return Math.max(0, Math.min(State.run.time, t));
  },

  rect({ e, lane }) {
    const height = this.rowHeight - 2, row = e[EVENT.rank];
    const thick = height / this.lanes[row];
    const x = this.x(e[EVENT.start]);
    return [x, this.top + row * this.rowHeight + 1 + lane * thick,
      Math.max(0.7, this.x(e[EVENT.left]) - x - 0.4), Math.max(0.6, thick - (thick > 3 ? 0.6 : 0))];
  },

  paintBars() {
    const buffer = document.createElement("canvas"), real = $("timeline");
    buffer.width = real.width;
    buffer.height = real.height;
    const c = buffer.getContext("2d"), ratio = devicePixelRatio || 1;
    c.scale(ratio, ratio);
    const { width, height } = this.view, run = State.run;
    c.font = "11px system-ui, sans-serif";
    c.fillStyle = colour("soft");
    c.textBaseline = "middle";
    const rough = this.span() / 8, power = 10 ** Math.floor(Math.log10(rough));
    const tick = [1, 2, 5, 10].map((m) => m * power).find((t) => t >= rough);
    const optimum = DATA.bound && DATA.bound < run.time ? this.x(DATA.bound) : -1000;
    for (let t = Math.ceil(this.from / tick) * tick; t <= this.from + this.span(); t += tick) {
      const x = this.x(t);
      c.fillStyle = colour("grid");
      c.fillRect(x, this.top - 4, 1, height - this.top);
      c.fillStyle = colour("soft");
      c.textAlign = t === 0 ? "left" : "center";
      if (Math.abs(x - optimum) > 60) c.fillText(t === 0 ? "0" : timeText(t, run.time), x, 9);
    }
    c.textAlign = "right";
    const every = Math.ceil(11 / this.rowHeight);
    for (let row = 0; row < DATA.ranks; row += every) {
      c.fillStyle = colour("soft");
      c.fillText(rankName(row), this.labels - 10, this.top + (row + 0.5) * this.rowHeight);
    }
    c.save();
    c.beginPath();
    c.rect(this.labels, 0, width - this.labels, height);
    c.clip();
    for (const bar of this.bars) {
      if (bar.e[EVENT.left] < this.from || bar.e[EVENT.start] > this.from + this.span()) continue;
      c.fillStyle = ownerColour(Trees.ownerOf(bar.e));
      c.globalAlpha = State.run.reduces && !bar.e[EVENT.reduced] ? 0.62 : 0.92;
      c.fillRect(...this.rect(bar));
    }
    c.restore();
    c.globalAlpha = 1;
    if (optimum > this.labels && optimum < width) {
      c.fillStyle = colour("good");
      c.fillRect(optimum, this.top - 6, 1.5, height - this.top + 4);
      c.textAlign = "center";
      c.fillText("optimum", Math.min(width - 30, optimum), 9);
    }
    this.buffer = buffer;
  },

  paint() {
    const { context, width, height } = this.view;
    context.clearRect(0, 0, width, height);
    context.drawImage(this.buffer, 0, 0, width, height);
    if (this.hover) {
      context.strokeStyle = colour("cursor");
      context.lineWidth = 1.5;
      context.strokeRect(...this.rect(this.hover));
    }
    const x = this.x(State.time);
    if (x >= this.labels - 1 && x <= width) {
      context.fillStyle = colour("cursor");
      context.fillRect(x - 0.75, this.top - 6, 1.5, height - this.top + 4);
      context.beginPath();
      context.arc(x, this.top - 7, 3.5, 0, 7);
      context.fill();
    }
    const whole = State.run.time;
    $("clock").textContent = `${timeText(State.time, whole)} of ${timeText(whole)}`;
  },

  find(event) {
    const box = $("timeline").getBoundingClientRect();
    const x = event.clientX - box.left, y = event.clientY - box.top;
    return this.bars.find((bar) => {
      const [l, t, w, h] = this.rect(bar);
      return x >= l - 1 && x <= l + w + 1 && y >= t && y <= t + Math.max(h, 2);
    }) || null;
  },

  tip(event, { e }) {
    const run = State.run, route = run.routes[e[EVENT.route]].map((n) => DATA.nodes[n].id);
    const size = (DATA.size / run.chunks / run.pieces) * e[EVENT.count];
    const what = e[EVENT.count] > 1 ? `chunks ${e[EVENT.chunk]} and on` : `chunk ${e[EVENT.chunk]}`;
    const ends = [rankName(e[EVENT.rank]), rankName(e[EVENT.peer])].map(escapeText);
    const piece = run.pieces > 1 ? `, piece ${e[EVENT.piece]}` : "";
    showTip(event, `<b>${ends.join(" \u2192 ")}</b> ` +
      `<span>${what}${piece}, ${bytesText(size)}</span><br>` +
      `${escapeText(route.join(" \u203a "))}<br>` +
      `step ${e[EVENT.step] + 1}: ${timeText(e[EVENT.start])} to ${timeText(e[EVENT.end])}`);
  },

  listen() {
    const canvas = $("timeline");
    let dragging = false;
    const seek = (event) => {
      play(false);
      setTime(this.time(event.clientX - canvas.getBoundingClientRect().left));
    };
    canvas.addEventListener("pointerdown", (event) => {
      dragging = true;
      canvas.setPointerCapture(event.pointerId);
      setMode("flow");
      seek(event);
    });
    canvas.addEventListener("pointerup", () => { dragging = false; });
    canvas.addEventListener("pointermove", (event) => {
      if (dragging) return seek(event);
      this.hover = this.find(event);
      if (this.hover) this.tip(event, this.hover); else hideTip();
      return this.paint();
    });
    canvas.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.shiftKey) return;
      event.preventDefault();
      const turned = event.deltaY || event.deltaX;
      const x = event.clientX - canvas.getBoundingClientRect().left;
      if (event.ctrlKey) this.zoomTo(turned < 0 ? 1.25 : 0.8, this.time(x));
      else this.move(this.from + Math.sign(turned) * this.span() / 10);
    }, { passive: false });
    canvas.addEventListener("keydown", (event) => {
      const way = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!way) return;
      event.preventDefault();
      event.stopPropagation();
      if (event.shiftKey) return this.move(this.from + way * this.span() / 10);
      play(false);
      setMode("flow");
      setTime(Math.max(0, Math.min(State.run.time, State.time + way * this.span() / 100)));
    });
    canvas.addEventListener("pointerleave", () => { this.hover = null; hideTip(); this.paint(); });
  },
};
