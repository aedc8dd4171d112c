// Small helpers to build and update the page. Text only ever goes in as text, never as markup.

export function h(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

// Changes the text only where it differs, so that an unchanged page costs nothing and a selection survives.
export function text(node, value) {
  if (node.textContent !== value) node.textContent = value;
}

export function data(node, name, value) {
  if (node.dataset[name] !== value) node.dataset[name] = value;
}

// Makes the children of `parent` be one node per item, reusing nodes by key.
export function list(parent, items, key, create, update) {
  const old = new Map([...parent.children].map((node) => [node.dataset.key, node]));
  items.forEach((item, i) => {
    const k = key(item);
    let node = old.get(k);
    if (node) old.delete(k);
    else {
      node = create(item);
      node.dataset.key = k;
    }
    update(node, item);
    if (parent.children[i] !== node) parent.insertBefore(node, parent.children[i] ?? null);
  });
  for (const node of old.values()) node.remove();
}
