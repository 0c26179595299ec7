"""Pages to look at what was generated: pictures, prompt, completion and answer, in one HTML file without any other.

What comes from data or models is escaped: nothing in it can act on the page.
"""

import base64
import io
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

import numpy as np

# Cards of a page, so that a browser can open it.
MOST_CARDS = 96


class Card(NamedTuple):
  """One example.

  Attributes:
    title: a line above it.
    images: uint8 [S, S, 3] each.
    lines: (what it is, its text).
    right: whether it is right; None: nobody says.
  """

  title: str
  images: Sequence[np.ndarray] = ()
  lines: Sequence[tuple[str, str]] = ()
  right: bool | None = None


def data_url(image: np.ndarray) -> str:
  """An image, uint8 [S, S, 3], as a PNG within a URL."""
  from PIL import Image  # only where there are images
  held = io.BytesIO()
  Image.fromarray(np.asarray(image)).save(held, format="PNG", optimize=True)
  return "data:image/png;base64," + base64.b64encode(held.getvalue()).decode()


def picture(image: np.ndarray) -> str:
  """The element that shows an image; small ones are enlarged without smoothing."""
  kind = ' class="small"' if image.shape[0] < 64 else ""
  return f'<img{kind} alt="{image.shape[1]} × {image.shape[0]} pixels" src="{data_url(image)}">'


def page(title: str, cards: Sequence[Card], total: int, notes: str = "") -> str:
  """The page: `notes` with their line breaks, and a grid of the cards, the first of `total`."""
  count = f"{total} examples" if len(cards) == total else f"the first {len(cards)} of {total} examples"
  return _PAGE.format(title=escape(title), notes=escape(notes), count=count, cards="".join(map(_card, cards)))


def _card(card: Card) -> str:
  kind = {None: "", True: " right", False: " wrong"}[card.right]
  mark = {None: "", True: "right: ", False: "wrong: "}[card.right]
  pictures = "".join(map(picture, card.images))
  lines = "".join(f"<dt>{escape(what)}<dd>{escape(text) or '<i>nothing</i>'}" for what, text in card.lines)
  return f'<section class="card{kind}"><h2>{mark}{escape(card.title)}</h2>{pictures}<dl>{lines}</dl></section>'


_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2rem; }}
main {{ display: grid; grid-template-columns: repeat(auto-fill, minmax(16rem, 1fr)); gap: 1rem; }}
.card {{ border: 1px solid #8886; border-left: .4rem solid #8886; border-radius: .3rem; padding: .6rem .8rem; }}
.right {{ border-left-color: #2e9e5b; }} .wrong {{ border-left-color: #c44e52; }}
h2 {{ font-size: .8rem; font-weight: 600; margin: 0 0 .4rem; overflow-wrap: anywhere; }}
img {{ max-width: 100%; margin: 0 .3rem .3rem 0; }} .small {{ width: 6rem; image-rendering: pixelated; }}
dl {{ margin: 0; }} dt {{ font-size: .75rem; opacity: .7; }}
dd {{ margin: 0 0 .3rem; white-space: pre-wrap; overflow-wrap: anywhere; font-family: ui-monospace, monospace; }}
pre {{ font: 13px/1.4 ui-monospace, monospace; overflow-x: auto; }}
</style>
<h1>{title}</h1>
<pre>{notes}</pre>
<p>{count}</p>
<main>{cards}</main>
</html>
"""
