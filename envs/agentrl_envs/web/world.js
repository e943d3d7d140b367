// Runs in every page before its own scripts: seeded chance, a clock that only we move, and a numbered listing.
((seed) => {
  'use strict';
  const EPOCH = 1600000000000;
  const MOST_TIMERS = 20000;
  const SKIPPED = new Set(['query', 'reward-display', 'sync-task-cover', 'click-canvas']);
  const CUT = 200;

  // ---- chance
  let state = seed >>> 0;
  const draw = () => {  // mulberry32
    state = (state + 0x6d2b79f5) >>> 0;
    let t = state;
    t = Math.imul(t ^ (t >>> 15), t | 1);
    t ^= t + Math.imul(t ^ (t >>> 7), t | 61);
    return ((t ^ (t >>> 14)) >>> 0) / 4294967296;
  };
  Math.random = draw;
  crypto.getRandomValues = (array) => {
    for (let i = 0; i < array.length; i++) array[i] = Math.floor(draw() * 4294967296);
    return array;
  };

  // ---- time
  let now = 0, serial = 0;
  const timers = new Map();
  const add = (call, delay, every) => {
    timers.set(++serial, { call, due: now + Math.max(Number(delay) || 0, every ? 1 : 0), every });
    return serial;
  };
  const drop = (id) => { timers.delete(id); };
  window.setTimeout = (call, delay, ...rest) => add(() => call(...rest), delay, false);
  window.setInterval = (call, delay, ...rest) => add(() => call(...rest), delay, Math.max(Number(delay) || 0, 1));
  window.requestAnimationFrame = (call) => add(() => call(now), 16, false);
  window.clearTimeout = window.clearInterval = window.cancelAnimationFrame = drop;
  window.requestIdleCallback = undefined;
  const RealDate = Date;
  window.Date = new Proxy(RealDate, {
    construct: (target, given, as) => Reflect.construct(target, given.length ? given : [EPOCH + now], as),
    apply: () => new RealDate(EPOCH + now).toString(),
    get: (target, key) => (key === 'now' ? () => EPOCH + now : Reflect.get(target, key)),
  });
  performance.now = () => now;
  const advance = (span) => {
    const end = now + span;
    for (let run = 0; run < MOST_TIMERS; run++) {
      let next = 0, due = end;
      for (const [id, timer] of timers) {
        if (timer.due < due || (timer.due === due && !next)) { next = id; due = timer.due; }
      }
      if (!next) break;
      const timer = timers.get(next);
      now = Math.max(now, timer.due);
      if (timer.every) timer.due = now + timer.every; else timers.delete(next);
      try { timer.call(); } catch (error) { console.error(String(error)); }
    }
    now = end;
  };

  // ---- what would lead out of the page
  window.open = () => null;
  window.alert = () => undefined;
  window.confirm = () => false;
  window.prompt = () => null;
  window.print = () => undefined;

  // ---- the listing
  const numbers = new WeakMap();
  const elements = [null];  // by number
  const numberOf = (element) => {
    if (!numbers.has(element)) { numbers.set(element, elements.length); elements.push(element); }
    return numbers.get(element);
  };
  const tidy = (text) => String(text || '').replace(/\s+/g, ' ').trim();
  const visible = (element) => element.checkVisibility({ visibilityProperty: true, opacityProperty: true });
  const ownText = (element) => tidy([...element.childNodes].filter((n) => n.nodeType === 3).map((n) => n.data).join(' '));
  const roleOf = (element) => {
    const tag = element.tagName.toLowerCase();
    if (tag === 'input') {
      const type = element.type;
      if (type === 'checkbox' || type === 'radio') return type;
      return ['button', 'submit', 'reset', 'image'].includes(type) ? 'button' : 'textbox';
    }
    if (tag === 'textarea' || element.isContentEditable && !element.parentElement?.isContentEditable) return 'textbox';
    if (tag === 'select') return element.multiple ? 'listbox' : 'combobox';
    if (tag === 'button') return 'button';
    if (tag === 'a') return 'link';
    if (element.getAttribute('role') === 'tab') return 'tab';
    if (/^h[1-6]$/.test(tag)) return 'heading';
    if (tag === 'td' || tag === 'th') return 'cell';
    if (tag === 'label') return 'label';
    return ownText(element) && getComputedStyle(element).cursor === 'pointer' ? 'link' : 'text';
  };
  const nameOf = (element, role) => {
    if (role === 'button' || role === 'link' || role === 'tab') {
      return tidy(element.innerText || element.value || element.getAttribute('aria-label') || element.title);
    }
    if (element.labels || role === 'textbox') {
      const label = [...(element.labels || [])].map((l) => ownText(l) || tidy(l.innerText)).join(' ');
      return tidy(element.getAttribute('aria-label')) || label || tidy(element.placeholder || element.title);
    }
    return ownText(element);
  };
  const describe = (element, role) => {
    const found = { number: numberOf(element), role, name: nameOf(element, role) };
    if (role === 'checkbox' || role === 'radio') found.checked = element.checked;
    if (role === 'textbox') found.value = element.value ?? element.innerText;
    if (role === 'textbox' && element.type === 'password') found.secret = true;
    if (element.tagName === 'SELECT') {
      found.options = [...element.options].slice(0, CUT).map((option) => tidy(option.text));
      found.value = [...element.selectedOptions].map((option) => tidy(option.text)).join(', ');
    }
    const icon = /\b(folder|file)\b/.exec(element.className);  // what a person sees and a text does not say
    if (icon) found.icon = icon[1];
    if (element.disabled) found.disabled = true;
    return found;
  };
  const WHOLE = new Set(['button', 'link', 'tab', 'textbox', 'combobox', 'listbox', 'checkbox', 'radio']);
  const walk = (element, found) => {
    if (found.length >= CUT || SKIPPED.has(element.id) || !visible(element)) return;
    if (['SCRIPT', 'STYLE', 'NOSCRIPT'].includes(element.tagName)) return;
    const role = roleOf(element);
    const names = role === 'label' && element.control && element.contains(element.control);  // said with its control
    if (WHOLE.has(role) || (!names && ownText(element))) found.push(describe(element, role));
    const inside = role === 'link' ? element.querySelector('button,input,select,textarea') : !WHOLE.has(role);
    if (inside) for (const child of element.children) walk(child, found);
  };
  const list = () => {
    const found = [];
    for (const child of document.body.children) walk(child, found);
    return found;
  };

  // ---- acting
  const ask = (number) => {
    const element = elements[number];
    if (!element || number < 1) return { error: `there is no element ${number}` };
    if (!element.isConnected || !visible(element)) return { error: `element ${number} is not on the page any more` };
    if (element.disabled) return { error: `element ${number} is disabled` };
    return { element };
  };
  const aim = (number) => {
    const { element, error } = ask(number);
    if (error) return { error };
    element.scrollIntoView({ block: 'center', inline: 'center', behavior: 'instant' });
    for (const box of element.getClientRects()) {
      const x = box.left + box.width / 2, y = box.top + box.height / 2;
      const hit = document.elementFromPoint(x, y);
      if (hit && (element.contains(hit) || hit.contains(element) && hit.tagName === 'LABEL')) return { x, y };
    }
    return { error: `element ${number} is covered by another` };
  };
  const changed = (element) => {
    element.dispatchEvent(new Event('input', { bubbles: true }));
    element.dispatchEvent(new Event('change', { bubbles: true }));
  };
  const write = (number, text) => {  // "" when the text is to be typed by the keyboard, into what is selected now
    const { element, error } = ask(number);
    if (error) return error;
    if (roleOf(element) !== 'textbox') return `element ${number} takes no text`;
    if (element.readOnly) return `element ${number} is read-only`;
    if (document.activeElement !== element) return `element ${number} does not take the focus`;
    if (['date', 'time', 'month', 'week', 'datetime-local', 'color', 'range'].includes(element.type)) {
      element.value = text;
      if (element.value !== text) return `element ${number} takes a ${element.type}, not that text`;
      changed(element);
      return null;
    }
    if (element.select) element.select(); else document.getSelection().selectAllChildren(element);
    return '';
  };
  const choose = (number, text) => {
    const { element, error } = ask(number);
    if (error) return error;
    if (element.tagName !== 'SELECT') return `element ${number} has no options`;
    const option = [...element.options].find((candidate) => tidy(candidate.text) === tidy(text));
    if (!option || option.disabled) return `element ${number} has no such option`;
    if (element.multiple) option.selected = true; else element.value = option.value, option.selected = true;
    changed(element);
    return null;
  };
  const view = (span) => {
    advance(span);
    return {
      elements: list(),
      ended: Boolean(window.WOB_DONE_GLOBAL) || window.submitted !== undefined,
      reward: window.WOB_DONE_GLOBAL ? window.WOB_RAW_REWARD_GLOBAL : null,
      submitted: window.submitted === undefined ? null : window.submitted,
    };
  };
  const begin = (span) => {  // what the START cover of a MiniWoB++ page would do, without its time limit
    const still = new CSSStyleSheet();
    still.replaceSync('*{transition:none!important;animation:none!important;scroll-behavior:auto!important}');
    document.adoptedStyleSheets = [still];
    if (window.core) {
      core.EPISODE_MAX_TIME = 1e9;
      core.startEpisodeReal();
    }
    return { query: tidy(document.getElementById('query')?.innerText), ...view(span) };
  };
  const digest = () => {
    const body = document.body.cloneNode(true);
    for (const id of ['reward-display', 'click-canvas']) body.querySelector('#' + id)?.remove();
    const values = [...document.querySelectorAll('input,textarea,select')].map((e) => [e.value, e.checked ?? null]);
    return JSON.stringify([body.innerHTML, values, now, state]);
  };
  window.__world = { aim, write, choose, view, begin, digest };
})(SEED);
