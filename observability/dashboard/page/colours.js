// The page's colours, and what each means. A colour has one meaning on the whole page:
//
//   red          a bound that was passed, or tokens that were lost; nothing else
//   version hues the weight version; six that repeat, neighbours differ in hue and in lightness
//   teal         amounts; a paler teal is a smaller or an earlier part of the same amount
//   greys        everything else: idle, paused, discarded, unknown, the trainer's activities
//
// In the comparison of runs, which shows no versions, the same hues are runs.
//
// Neither the version hues nor any pair of parts relies on telling red from green.

const VERSION_HUES = [
  [212, 62, 50], // blue
  [43, 85, 52], // amber
  [270, 40, 48], // violet
  [190, 60, 58], // cyan
  [30, 55, 38], // brown
  [292, 40, 72], // lilac
];

/** Return the colour of a weight version; -1 stands for a version that is not known. */
export function versionColour(version) {
  if (version < 0) return "#8a94a0";
  const [hue, saturation, light] = VERSION_HUES[version % VERSION_HUES.length];
  return `hsl(${hue} ${saturation}% ${light}%)`;
}

/** Return a pale tone of a version's colour, on which black text can be read. */
export function versionTint(version) {
  if (version < 0) return "#d5dade";
  const [hue, saturation, light] = VERSION_HUES[version % VERSION_HUES.length];
  return `hsl(${hue} ${saturation}% ${64 + 0.28 * light}%)`;
}

/** Return the colour and the dashes of a compared run's curve: hues repeat with other dashes. */
export const runLook = (number) =>
  ({ colour: versionColour(number), dashes: number < VERSION_HUES.length ? [] : [5, 3] });

/** Return a teal that is darker for a larger share, 0 to 1; black text can be read on it. */
export const shade = (share) => `hsl(192 55% ${92 - 36 * Math.min(1, Math.max(0, share))}%)`;

/** Return the colour of a token's lag: teal up to the bound, red beyond it. */
export function lagColour(lag, bound) {
  if (bound !== null && lag > bound) return "hsl(6 85% 76%)";
  return shade(lag / Math.max(1, bound ?? 4));
}

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** Return the present theme's colours, for canvases. */
export const theme = () => ({ ink: css("--ink"), quiet: css("--quiet"), line: css("--line"),
  card: css("--card"), accent: css("--accent"),
  paler: css("--accent-paler"), palest: css("--accent-palest"), bad: css("--bad"), idle: css("--idle") });
