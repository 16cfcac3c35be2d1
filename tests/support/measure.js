// What is wrong with the drawing of a tree: texts and boxes that overlap, texts that are cut, edges through words, small letters,
// panes and pages that scroll sideways.
() => {
  const near = 0.75;
  const seen = (element) => { const one = element.getBoundingClientRect(); return one.width > 0 && one.height > 0; };
  const box = (element) => { const range = document.createRange(); range.selectNodeContents(element); return range.getBoundingClientRect(); };
  const meets = (a, b) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > near && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > near;
  const found = { overlaps: [], clipped: [], crossed: [], small: [], wide: [] };
  const all = (selector) => [...document.querySelectorAll(selector)].filter(seen);
  const texts = all('.drawing .line > *, .drawing .node > .times, .drawing .ends > *, .drawing .head .depth').filter((one) => one.textContent.trim());
  const boxes = texts.map(box);
  texts.forEach((a, i) => texts.slice(i + 1).forEach((b, j) => {
    if (meets(boxes[i], boxes[i + 1 + j])) found.overlaps.push(`${a.textContent} / ${b.textContent}`);
  }));
  for (const icon of all('.drawing .node .icon')) {
    const place = icon.getBoundingClientRect();
    texts.forEach((text, i) => { if (!text.contains(icon) && meets(place, boxes[i])) found.overlaps.push(`icon over ${text.textContent}`); });
  }
  const nodes = all('.drawing .node');
  // A narrow box shows whole words or none: half an id is another id.
  for (const node of nodes.filter((one) => one.clientWidth < 54)) {
    const known = new Set(node.getAttribute('aria-label').match(/\w+/g));
    for (const word of [...node.querySelectorAll('.words, .line.foreign')].flatMap((one) => one.textContent.match(/\w+/g) ?? [])) if (!known.has(word)) found.clipped.push(word);
  }
  const frames = nodes.map((one) => one.getBoundingClientRect());
  const ends = all('.leaf .ends').map((one) => one.getBoundingClientRect());
  nodes.forEach((a, i) => {
    nodes.slice(i + 1).forEach((b, j) => { if (meets(frames[i], frames[i + 1 + j])) found.overlaps.push(`${a.dataset.step} over ${b.dataset.step}`); });
    if (ends.some((end) => meets(frames[i], end))) found.overlaps.push(`${a.dataset.step} over results`);
  });
  texts.forEach((text, i) => {
    const frame = (text.closest('.node') ?? text.closest('.ends, .head')).getBoundingClientRect();
    const own = boxes[i];
    if (own.left < frame.left - near || own.right > frame.right + near || own.top < frame.top - 3 || own.bottom > frame.bottom + 3) found.clipped.push(text.textContent);
    if (parseFloat(getComputedStyle(text).fontSize) < 12) found.small.push(text.textContent);
  });
  const words = all('.drawing .words, .drawing .second');
  const places = words.map(box);
  const origin = document.querySelector('.edges')?.getBoundingClientRect();
  for (const edge of document.querySelectorAll('.edge')) {
    const length = edge.getTotalLength();
    for (let at = 0; at <= length; at += 3) {
      const point = edge.getPointAtLength(at);
      const [x, y] = [point.x + origin.left, point.y + origin.top];
      places.forEach((place, i) => { if (x > place.left + near && x < place.right - near && y > place.top && y < place.bottom) found.crossed.push(words[i].textContent); });
    }
  }
  if (document.documentElement.scrollWidth > innerWidth) found.wide.push(`page ${document.documentElement.scrollWidth}`);
  for (const pane of document.querySelectorAll('.scroller, .pathpane')) if (pane.scrollWidth > pane.clientWidth + 1) found.wide.push(`${pane.className} ${pane.scrollWidth} in ${pane.clientWidth}`);
  return found;
}
