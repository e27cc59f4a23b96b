// The map of slots: one canvas, of which the cells that have changed are drawn again.
const SIZES = [18, 15, 12, 10, 8, 7, 6, 5];
const MOST_PER_ROW = 20;
const LABEL = 16;

class SlotMap {
  constructor(canvas, room) {
    this.canvas = canvas;
    this.room = room;
    this.context = canvas.getContext("2d");
    this.cells = [];
    this.first = new Map();
    this.labels = [];
    this.size = 10;
    this.laid = false;
    this.stale = true;
    this.dirty = new Set();
    this.run = null;
    this.at = -1;
  }

  changed(container, slot) {
    if (this.first.has(container)) this.dirty.add(this.first.get(container) + slot);
  }

  // Containers are rows of cells, nodes blocks of rows: as large as fits into about a screen.
  lay() {
    const width = this.room.clientWidth;
    const nodes = new Map();
    const ordered = [...containers.values()].sort((a, b) => (a.node < b.node ? -1 : a.node > b.node ? 1 : a.index - b.index));
    for (const container of ordered) nodes.set(container.node, [...(nodes.get(container.node) || []), container]);
    const limit = Math.max(300, window.innerHeight * 0.6);
    const kept = this.cell();
    for (this.size of SIZES) if (this.place(nodes, width) <= limit) break;
    this.at = kept ? this.cells.findIndex((cell) => cell.container === kept.container && cell.slot === kept.slot) : -1;
    const scale = window.devicePixelRatio || 1;
    this.canvas.width = width * scale;
    this.canvas.height = this.height * scale;
    this.canvas.style.width = `${width}px`;
    this.canvas.style.height = `${this.height}px`;
    this.context.setTransform(scale, 0, 0, scale, 0, 0);
    this.laid = this.stale = true;
  }

  place(nodes, width) {
    const gap = this.size > 7 ? 2 : 1, pitch = this.size + gap;
    this.cells = [];
    this.labels = [];
    this.first.clear();
    let x = 0, y = 0, tallest = 0;
    const labelled = nodes.size > 1 ? LABEL : 0;
    const total = [...nodes.values()].reduce((count, members) => count + members.length, 0);
    for (const [node, members] of nodes) {
      const most = Math.max(1, ...members.map((one) => one.slots.length));
      const perRow = Math.min(most, MOST_PER_ROW), rowHeight = Math.ceil(most / perRow) * pitch + gap, rowWidth = perRow * pitch + 3 * gap;
      const wish = Math.ceil(Math.sqrt((members.length * rowHeight) / rowWidth));
      const share = Math.floor(((width - 4 * nodes.size) * members.length) / total / rowWidth);
      const columns = Math.max(1, Math.min(members.length, Math.max(wish, share), Math.floor(width / rowWidth)));
      const height = labelled + Math.ceil(members.length / columns) * rowHeight + 2 * gap;
      if (x > 0 && x + columns * rowWidth > width) [x, y, tallest] = [0, y + tallest, 0];
      if (labelled) this.labels.push({ text: node || "(no node yet)", x, y, width: columns * rowWidth - 2 * gap });
      members.forEach((container, number) => {
        const left = x + (number % columns) * rowWidth, top = y + labelled + Math.floor(number / columns) * rowHeight;
        this.first.set(container.id, this.cells.length);
        container.slots.forEach((_, slot) => {
          this.cells.push({ container: container.id, slot, x: left + (slot % perRow) * pitch, y: top + Math.floor(slot / perRow) * pitch });
        });
      });
      x += columns * rowWidth + 2 * gap;
      tallest = Math.max(tallest, height);
    }
    this.height = Math.max(this.size, Math.ceil(y + tallest));
    return this.height;
  }

  draw() {
    if (!this.laid) this.lay();
    if (this.stale || this.dirty.size > this.cells.length / 2) this.drawAll();
    else for (const index of this.dirty) this.drawCell(index);
    this.dirty.clear();
  }

  drawAll() {
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(`--${name}`).trim();
    this.colours = Object.fromEntries(["free", "leased", "eval", "interactive", "others", "resetting", "quarantined", "ink", "quiet", "part", "card"].map((name) => [name, colour(name)]));
    this.context.clearRect(0, 0, this.canvas.width, this.canvas.height);
    this.context.font = "11px system-ui, sans-serif";
    this.context.textBaseline = "top";
    this.context.fillStyle = this.colours.quiet;
    for (const label of this.labels) this.context.fillText(this.fitting(label.text, label.width), label.x, label.y + 2);
    for (let index = 0; index < this.cells.length; index += 1) this.drawCell(index);
    this.stale = false;
  }

  fitting(text, width) {
    while (text.length > 1 && this.context.measureText(text).width > width) text = `${text.slice(0, -2)}…`;
    return text;
  }

  drawCell(index) {
    const cell = this.cells[index], container = cell && containers.get(cell.container), slot = container && container.slots[cell.slot];
    if (!slot) return;
    const { context, size } = this;
    context.clearRect(cell.x - 1, cell.y - 1, size + 2, size + 2);
    context.globalAlpha = this.run === null || slot.run === this.run ? 1 : 0.22;
    context.fillStyle = this.colours[keyOf(slot)] || this.colours.leased;
    context.fillRect(cell.x, cell.y, size, size);
    context.globalAlpha = 1;
    if (container.state !== "ready") {
      context.fillStyle = this.colours.part;
      context.fillRect(cell.x, cell.y + size - 2, size, 2);
    }
    if (index === this.at) {
      context.strokeStyle = this.colours.ink;
      context.lineWidth = 2;
      context.strokeRect(cell.x, cell.y, size, size);
    }
  }

  cell() {
    return this.cells[this.at] || null;
  }

  choose(index) {
    if (index === this.at) return;
    const before = this.at;
    this.at = index;
    if (before >= 0) this.drawCell(before);
    if (index >= 0) this.drawCell(index);
    describeSlot();
  }

  find(x, y) {
    const reach = this.size + 2;
    return this.cells.findIndex((cell) => x >= cell.x - 1 && x < cell.x + reach && y >= cell.y - 1 && y < cell.y + reach);
  }

  beside(key) {
    if (this.at < 0) return this.cells.length ? 0 : -1;
    if (key === "ArrowLeft" || key === "ArrowRight") return Math.min(this.cells.length - 1, Math.max(0, this.at + (key === "ArrowRight" ? 1 : -1)));
    const from = this.cells[this.at], way = key === "ArrowDown" ? 1 : -1;
    let best = this.at, least = Infinity;
    this.cells.forEach((cell, index) => {
      const down = (cell.y - from.y) * way;
      const far = down + 4 * Math.abs(cell.x - from.x);
      if (down > 0 && far < least) [best, least] = [index, far];
    });
    return best;
  }
}

const keyOf = (slot) => (slot.state !== "leased" ? slot.state : !slot.run ? "others" : slot.kind === "train" ? "leased" : slot.kind || "leased");
