// Numbers and times as people read them; "–" where a value is not known.

export const NONE = "–";

const known = (x) => x !== null && x !== undefined && Number.isFinite(x);
const fixed = (digits) => {
  const f = new Intl.NumberFormat("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
  return (x) => (known(x) ? f.format(x).replace("-", "−").replace(/^−(0(\.0+)?)$/, "$1") : NONE);
};

export const int = fixed(0);
export const one = fixed(1);
export const two = fixed(2);
export const three = fixed(3);

export const percent = (x, digits = 1) => (known(x) ? `${[int, one, two][digits](x * 100)}%` : NONE);
export const times = (x) => (known(x) ? `${two(x)}×` : NONE);

// A count that may be fractional: whole when large, more digits when small.
export const amount = (x) => (known(x) ? (Math.abs(x) >= 100 ? int(x) : Math.abs(x) >= 10 ? one(x) : two(x)) : NONE);

export const small = (x) => (known(x) && x !== 0 && Math.abs(x) < 0.1 ? three(x) : two(x));

export function seconds(s) {
  if (!known(s)) return NONE;
  if (s < 0.01) return `${one(s * 1000)} ms`;
  if (s < 1) return `${int(s * 1000)} ms`;
  if (s < 10) return `${one(s)} s`;
  if (s < 120) return `${int(s)} s`;
  if (s < 7200) return `${int(s / 60)} min`;
  return s < 172_800 ? `${int(s / 3600)} h` : `${int(s / 86_400)} d`;
}

const DAY_S = 86_400;

// A time of today as hours, minutes and seconds; an older one with its date.
export function stamp(unixSeconds, now = Date.now() / 1000) {
  if (Math.floor(unixSeconds / DAY_S) === Math.floor(now / DAY_S) || now - unixSeconds < DAY_S / 2) return clock(unixSeconds);
  return `${day(unixSeconds)} ${clock(unixSeconds).slice(0, 5)}`;
}

export const day = (unixSeconds) => new Date(unixSeconds * 1000).toLocaleDateString("en-GB", { day: "numeric", month: "short" });

export const clock = (unixSeconds) =>
  new Date(unixSeconds * 1000).toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });
