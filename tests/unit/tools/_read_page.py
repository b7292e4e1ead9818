"""Reads a page of ``kvtier report`` as whoever looks at it, or hears it, does."""

from __future__ import annotations

import re
from dataclasses import dataclass
from xml.etree import ElementTree as ET

Element = ET.Element


@dataclass
class Graph:
    """One picture of a page, and what is said of it."""

    title: str
    text: str  #: for those who don't see it
    shapes: list[tuple[str, str, dict[str, str]]]  #: kind, class and attributes


class ReadPage:
    """A page's parts. It must be well-formed: what isn't escaped in it would end its elements."""

    def __init__(self, html: str) -> None:
        self.html = html
        first, _, rest = html.partition("\n")
        assert first == "<!doctype html>"
        self.root = ET.fromstring(rest)

    @property
    def title(self) -> str:
        (heading,) = self.root.iter("h1")
        return _text(heading)

    @property
    def summary(self) -> list[str]:
        return [_text(each) for each in self._sections("summary")[0].iter("p")]

    @property
    def verdict(self) -> str:
        return self._sections("summary")[0].attrib["class"].removeprefix("summary").strip()

    @property
    def panels(self) -> list[str]:
        return [(each.text or "").strip() for each in self.root.iter("h2")]

    @property
    def graphs(self) -> dict[str, Graph]:
        found = {}
        for svg in self.root.iter("svg"):
            title, text = svg.findtext("title") or "", svg.findtext("desc") or ""
            shapes = [
                (each.tag, each.get("class", ""), dict(each.attrib))
                for each in svg
                if each.tag in {"polyline", "polygon", "rect"}
            ]
            found[title] = Graph(title, _plain(text), shapes)
        return found

    @property
    def tables(self) -> dict[str, list[list[str]]]:
        """All tables with a name: rows, without their heads."""
        return {
            _text(each[0]): _rows(each)
            for each in self.root.iter("table")
            if len(each) > 1 and each[0].tag == "caption"
        }

    @property
    def figures(self) -> dict[str, list[str]]:
        """What is drawn, as the table of all figures has it: a column by its head."""
        (details,) = self.root.iter("details")
        (table,) = details.iter("table")
        heads = [_text(each) for each in table.find("thead/tr") or ()]
        columns = zip(*_rows(table), strict=True)
        return dict(zip(heads, map(list, columns), strict=True))

    @property
    def addresses(self) -> list[str]:
        """What a browser would fetch, and what it would run."""
        attributes = ("src", "href", "srcset", "data", "action", "poster")
        found = [each.get(name) for each in self.root.iter() for name in attributes]
        style = "".join(each.text or "" for each in self.root.iter("style"))
        return [
            *(each for each in found if each),
            *re.findall(r"(?:url\(|@import|https?://).{0,80}", style),
            *(each.tag for each in self.root.iter() if each.tag in {"script", "link", "iframe"}),
            *(name for each in self.root.iter() for name in each.attrib if name.startswith("on")),
        ]

    def _sections(self, style: str) -> list[Element]:
        return [
            each for each in self.root.iter("section") if style in each.get("class", "").split()
        ]


def _rows(table: Element) -> list[list[str]]:
    return [[_text(cell) for cell in row] for row in table.findall("tbody/tr")]


def _text(element: Element) -> str:
    return _plain("".join(element.itertext()))


def _plain(text: str) -> str:
    return text.replace("\N{NO-BREAK SPACE}", " ")
