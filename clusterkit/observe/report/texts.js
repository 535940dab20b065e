// Elements and texts of all parts. Text is set as text, never as markup.
const MOST_CELLS = 4e6; // of a comparison: two memories of 2,000 words each

const make = (name, attributes, ...children) => {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes ?? {})) element.setAttribute(key, value);
  element.append(...children.filter((child) => child !== null));
  return element;
};

// Words of both texts as [kind, words]: 0 in both, 1 only in the new one, -1 only in the old one.
const compare = (old, now) => {
  const [was, is] = [old, now].map((text) => text.match(/\S+\s*/g) ?? []);
  const [a, b] = [was, is].map((words) => words.map((word) => word.trimEnd()));
  if (a.length * b.length > MOST_CELLS) return [[1, is.join("")]];
  const width = b.length + 1;
  const common = new Uint16Array((a.length + 1) * width);
  for (let i = a.length - 1; i >= 0; i--) {
    for (let j = b.length - 1; j >= 0; j--) {
      common[i * width + j] = a[i] === b[j] ? common[(i + 1) * width + j + 1] + 1
        : Math.max(common[(i + 1) * width + j], common[i * width + j + 1]);
    }
  }
  const found = [];
  const add = (kind, word) => {
    if (found.at(-1)?.[0] === kind) found.at(-1)[1] += word;
    else found.push([kind, word]);
  };
  let i = 0, j = 0;
  while (i < a.length || j < b.length) {
    if (i < a.length && j < b.length && a[i] === b[j]) { add(0, is[j]); i++; j++; }
    else if (j === b.length || (i < a.length && common[(i + 1) * width + j] >= common[i * width + j + 1])) add(-1, was[i++]);
    else add(1, is[j++]);
  }
  return found;
};

// Put a text into an element, with what is new in it and what is gone since the old one marked.
const showChanges = (element, old, now) => {
  for (const [kind, words] of compare(old, now)) {
    if (kind < 0) element.append(/(^|\s)$/.test(element.textContent) ? "" : " ", make("del", {}, words.trim()), " ");
    else element.append(kind ? make("ins", {}, words) : words);
  }
};
