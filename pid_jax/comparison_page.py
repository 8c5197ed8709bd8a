"""One HTML page that compares pictures: side by side, under a slider, at any zoom.

Everything is in the file: pictures as JPEG data, style and script. Nothing is loaded from
elsewhere, and the page's own policy forbids it.
"""

import base64
import html
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from pid_jax import images
from pid_jax.files import atomic_write

MOST_BYTES = 64 << 20  # of pictures in a page: browsers open it at once
QUALITY = 95
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
STYLE = """
body { font: 15px/1.4 system-ui, sans-serif; margin: 1rem; background: #111; color: #eee }
header { position: sticky; top: 0; background: #111; padding: .5rem 0; z-index: 1 }
section { margin: 1.5rem 0 } h2 { font-size: 1rem; margin: .2rem 0 }
p { margin: .2rem 0; color: #bbb }
.row { display: flex; gap: .5rem; overflow: auto } figure { margin: 0 } figcaption { color: #bbb }
.pane { overflow: hidden; width: 384px; height: 384px; background: #222 }
.pane img { transform-origin: 0 0; image-rendering: pixelated; display: block; max-width: none }
.over { position: relative } .over img { position: absolute; left: 0; top: 0 }
"""
SCRIPT = """
'use strict';
const zoom = document.getElementById('zoom'), blend = document.getElementById('blend');
const spot = new Map();
function draw(section) {
  const at = spot.get(section) || [0.5, 0.5];
  for (const pane of section.querySelectorAll('.pane')) for (const img of pane.children) {
    const fit = pane.clientWidth / img.naturalWidth, scale = fit * 2 ** zoom.value;
    const x = Math.max(0, img.naturalWidth * scale - pane.clientWidth) * at[0];
    const y = Math.max(0, img.naturalHeight * scale - pane.clientHeight) * at[1];
    img.style.transform = `translate(${-x}px, ${-y}px) scale(${scale})`;
    if (img.dataset.top) img.style.clipPath = `inset(0 ${100 - blend.value}% 0 0)`;
  }
}
const all = () => document.querySelectorAll('section').forEach(draw);
for (const section of document.querySelectorAll('section')) {
  const single = section.querySelectorAll('.pane:not(.over) img');
  for (const img of section.querySelectorAll('.over img')) img.src = single[img.dataset.of].src;
  section.addEventListener('mousemove', event => {
    const pane = event.target.closest('.pane');
    if (!pane) return;
    const box = pane.getBoundingClientRect();
    spot.set(section, [(event.clientX - box.left) / box.width,
                       (event.clientY - box.top) / box.height]);
    draw(section);
  });
}
zoom.oninput = blend.oninput = window.onload = all;
"""


class Comparison(NamedTuple):
    """One row of the page.

    Attributes:
      title, text: above the pictures.
      pictures: files by their label.
      slider: labels of the two that lie under the slider, or None.
    """

    title: str
    text: str
    pictures: Mapping[str, Path]
    slider: tuple[str, str] | None = None


def write(path: Path, title: str, rows: Sequence[Comparison]) -> int:
    """Writes the page.

    Rows follow each other until their pictures take 64 MiB; those beyond are named only.
    Returns:
      How many rows are shown.
    """
    shown: list[str] = []
    left = MOST_BYTES
    for row in rows:
        section, size = _section(row)
        if size > left:
            break
        shown.append(section)
        left -= size
    rest = [row.title for row in rows[len(shown):]]
    with atomic_write(path) as file:
        file.write(_page(title, shown, rest).encode("utf-8", "backslashreplace").decode())
    return len(shown)


def _section(row: Comparison) -> tuple[str, int]:
    """The HTML of a row, and the bytes of its pictures."""
    data = {label: _data(path) for label, path in row.pictures.items()}
    panes = [_figure(label, f'<img alt="{_text(label)}" src="{source}">')
             for label, source in data.items()]
    if row.slider:
        under, over = map(list(data).index, row.slider)
        panes.append(_figure(
            " | ".join(reversed(row.slider)), f'<img alt="" data-of="{under}"><img data-top="1" '
            f'alt="" data-of="{over}">', "pane over"))
    body = f'<h2>{_text(row.title)}</h2><p>{_text(row.text)}</p><div class="row">{"".join(panes)}'
    return f"<section>{body}</div></section>", sum(map(len, data.values()))


def _figure(label: str, inner: str, kind: str = "pane") -> str:
    return (f'<figure><div class="{kind}">{inner}</div><figcaption>{_text(label)}</figcaption>'
            "</figure>")


def _data(path: Path) -> str:
    buffer = io.BytesIO()
    images.decode(path.read_bytes()).save(buffer, "JPEG", quality=QUALITY)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()


def _text(value: str) -> str:
    return html.escape(value, quote=True)


def _page(title: str, sections: Sequence[str], rest: Sequence[str]) -> str:
    more = f"<p>Not shown here: {_text(', '.join(rest))}</p>" if rest else ""
    return (f'<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><meta http-equiv='
            f'"Content-Security-Policy" content="{POLICY}"><title>{_text(title)}</title><style>'
            f'{STYLE}</style></head><body><header><b>{_text(title)}</b> <label>zoom <input '
            'id="zoom" type="range" min="0" max="5" step="0.25" value="0"></label> <label>slider '
            '<input id="blend" type="range" min="0" max="100" value="50"></label></header>'
            f'{"".join(sections)}{more}<script>{SCRIPT}</script></body></html>\n')
