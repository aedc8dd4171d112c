// Freeze, force lossless, resume: asked for twice, with a reason, under a token.

import { order, token } from "./api.js";
import { h, text } from "./dom.js";

const ACTIONS = {
  freeze: { verb: "Freeze", effect: "The knobs stay as they are. Leniency may shrink, but it does not grow until someone resumes it." },
  lossless: { verb: "Force lossless", effect: "Decoding turns lossless with the next lease and stays so until someone resumes it. Answers get slower, never worse." },
  resume: { verb: "Resume", effect: "Lenity decides by itself again. Leniency comes back step by step, within the budget." },
};

export class Controls {
  // `onDone(words)` is told what was ordered.
  constructor(dialog, onDone) {
    Object.assign(this, { dialog, onDone, target: null, action: null });
    const find = (name) => dialog.querySelector(`[data-part=${name}]`);
    this.parts = Object.fromEntries(["title", "effect", "scope", "one", "why", "token-box", "token", "keep", "error", "confirm", "cancel"].map((n) => [n, find(n)]));
    dialog.querySelector("form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    this.parts.cancel.addEventListener("click", () => dialog.close());
    this.bar = h("div", { class: "controls", role: "group", "aria-label": "Orders" },
      ...Object.entries(ACTIONS).map(([name, { verb }]) => {
        const button = h("button", { type: "button", "data-action": name }, verb);
        button.addEventListener("click", () => this.open(name));
        return button;
      }));
  }

  // Which class is shown, and what was ordered for it.
  show(pool, cls, override) {
    this.target = { pool, cls };
    for (const button of this.bar.children) button.hidden = override ? button.dataset.action === override : button.dataset.action === "resume";
  }

  open(action) {
    const { verb, effect } = ACTIONS[action];
    this.action = action;
    this.aimed = { ...this.target };
    const { parts } = this;
    text(parts.title, `${verb}: ${this.aimed.pool}`);
    text(parts.effect, effect);
    text(parts.one, `only ${this.aimed.cls}`);
    text(parts.confirm, verb);
    parts.confirm.dataset.action = action;
    parts.why.value = "";
    this.dialog.querySelector("input[name=scope][value=all]").checked = true;
    this.fail("");
    this.askToken(token.get() === null);
    this.dialog.showModal();
    parts.why.focus();
  }

  askToken(needed) {
    this.parts["token-box"].hidden = !needed;
    this.parts.token.required = needed;
    this.parts.token.value = "";
  }

  fail(message) {
    text(this.parts.error, message);
    this.parts.error.hidden = message === "";
  }

  async send() {
    const { parts, action, aimed } = this;
    if (!parts["token-box"].hidden) token.set(parts.token.value.trim(), parts.keep.checked);
    const scope = this.dialog.querySelector("input[name=scope]:checked").value;
    parts.confirm.disabled = true;
    this.fail("");
    try {
      const done = await order(`/v1/pools/${encodeURIComponent(aimed.pool)}/actions`, { action, traffic_class: scope === "all" ? "*" : aimed.cls, why: parts.why.value });
      this.dialog.close();
      this.onDone(`${ACTIONS[action].verb} ordered by ${done.who}; in force at the next tick.`);
    } catch (error) {
      if (error.status === 401 || error.status === 403) {
        token.clear();
        this.askToken(true);
        parts.token.focus();
      }
      this.fail(error.status ? `Refused: ${error.message}.` : "The controller does not answer.");
    } finally {
      parts.confirm.disabled = false;
    }
  }
}
