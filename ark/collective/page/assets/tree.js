// Shows one tree at a time: all puts that carry one chunk, drawn over the network and as a diagram.
const Trees = {
  list: [], index: 0, current: null, timer: 0,

  // The number that determines a put's colour: a rank or, if one root owns all data, a chunk.
  ownerOf(e) {
    if (DATA.rooted) return e[EVENT.chunk];
    if (e[EVENT.source] >= 0) return e[EVENT.source];
    return Math.floor((e[EVENT.chunk] * DATA.ranks) / State.run.chunks);
  },

  collect() {
    const groups = new Map();
    for (const e of State.run.events) {
      if (e[EVENT.piece]) continue;
      const source = DATA.collective === "all_to_all" ? e[EVENT.source] : "";
      for (let k = 0; k < e[EVENT.count]; k++) {
        const key = `${e[EVENT.reduced]},${e[EVENT.chunk] + k},${source}`;
        if (!groups.has(key)) groups.set(key, { chunk: e[EVENT.chunk] + k, events: [] });
        groups.get(key).events.push(e);
      }
    }
    this.list = [...groups.values()].map((group) => this.shape(group))
      .sort((a, b) => a.upward - b.upward || a.root - b.root || a.chunk - b.chunk);
    this.choose(0);
  },

  shape({ chunk, events }) {
    const first = events[0];
    const upward = Boolean(State.run.reduces && !first[EVENT.reduced]);
    const edges = events.map((e) => ({ from: e[EVENT.rank], to: e[EVENT.peer],
      route: e[EVENT.route], start: e[EVENT.start], depth: 0 }))
      .sort((a, b) => a.start - b.start);
    // The depths of nodes are computed from the leaves in a tree that reduces, otherwise from the
    // root.
    const depth = new Map();
    for (const edge of edges) {
      edge.depth = depth.get(edge.from) || 0;
      depth.set(edge.to, Math.max(depth.get(edge.to) || 0, edge.depth + 1));
    }
    const targets = new Set(edges.map((e) => e.to)), senders = new Set(edges.map((e) => e.from));
    const ends = upward ? [...targets].filter((r) => !senders.has(r))
      : [...senders].filter((r) => !targets.has(r));
    const root = ends.length ? ends[0] : upward ? edges[edges.length - 1].to : edges[0].from;
    return { upward, chunk, edges, root, everywhere: upward && !ends.length,
      depth: 1 + Math.max(...edges.map((e) => e.depth)) };
  },

  choose(index) {
    const count = this.list.length;
    this.index = count ? (index + count) % count : 0;
    this.current = this.list[this.index] || null;
    $("treeCount").textContent = count ? `${this.index + 1} / ${count}` : "none";
    const tree = this.current;
    $("treeTitle").textContent = !tree ? "Trees" : tree.everywhere
      ? `Chunk ${tree.chunk}, on every rank` : tree.upward
      ? `Chunk ${tree.chunk} into ${rankName(tree.root)}`
      : `Chunk ${tree.chunk} from ${rankName(tree.root)}`;
    this.diagram();
    if (State.mode === "tree") Network.paint();
  },

  step(by) {
    setMode("tree");
    this.choose(this.index + by);
  },

  walk(on) {
    clearInterval(this.timer);
    this.timer = on ? setInterval(() => this.step(1), 900) : 0;
    $("treePlay").classList.toggle("on", on);
  },

  diagram() {
    const svg = $("tree"), tree = this.current;
    svg.replaceChildren();
    if (!tree) return;
    const box = svg.getBoundingClientRect();
    svg.setAttribute("viewBox", `0 0 ${box.width} ${box.height}`);
    // If all ranks send to all ranks, the puts do not form a tree. Then only the first put to each
    // rank is drawn.
    const children = new Map(), seen = new Set([tree.root]);
    for (const edge of tree.edges) {
      const [up, down] = tree.upward ? [edge.to, edge.from] : [edge.from, edge.to];
      if (seen.has(down)) continue;
      seen.add(down);
      if (!children.has(up)) children.set(up, []);
      children.get(up).push([down, edge]);
    }
    const spots = new Map();
    let leaf = 0, deepest = 0;
    const place = (rank, level) => {
      deepest = Math.max(deepest, level);
      const xs = (children.get(rank) || []).map(([down]) => place(down, level + 1));
      const x = xs.length ? (xs[0] + xs[xs.length - 1]) / 2 : leaf++;
      spots.set(rank, [x, level]);
      return x;
    };
    place(tree.root, 0);
    const wide = Math.max(1, leaf - 1), pad = 17;
    const roomX = (box.width - 2 * pad) / wide;
    const roomY = (box.height - 2 * pad) / Math.max(1, deepest);
    const radius = Math.max(3, Math.min(12, roomX * 0.43, roomY * 0.32));
    const at = (rank) => {
      const [x, level] = spots.get(rank);
      return [leaf < 2 ? box.width / 2 : pad + x * roomX, pad + level * roomY];
    };
    for (const [up, below] of children) {
      if (!spots.has(up)) continue;
      for (const [down, edge] of below) {
        const [x1, y1] = at(up), [x2, y2] = at(down);
        const middle = (y1 + y2) / 2;
        element("path", { d: `M${x1} ${y1}C${x1} ${middle} ${x2} ${middle} ${x2} ${y2}`,
          fill: "none", stroke: stepColour(edge.depth, tree.depth), "stroke-width": 2 }, svg);
      }
    }
    for (const rank of spots.keys()) {
      const [x, y] = at(rank), root = rank === tree.root;
      element("circle", { cx: x, cy: y, r: radius, fill: colour(root ? "text" : "rank"),
        stroke: colour(root ? "text" : "rim") }, svg);
      if (radius > 6) {
        const label = element("text", { x, y: y + 0.5, "font-size": radius * 0.95,
          "text-anchor": "middle", "dominant-baseline": "central" }, svg);
        label.setAttribute("fill", colour(root ? "ground" : "text"));
        label.textContent = rank;
      }
    }
  },
};
