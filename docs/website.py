"""Makes one website of the pages and of the reference of the API: `python docs/website.py FOLDER`.

Any warning is an error: a link that leads nowhere, a public name that can't be found, or a
docstring that can't be read.
"""

from __future__ import annotations

import posixpath
import re
import shutil
import sys
import warnings
from html import escape
from pathlib import Path
from string import Template

try:
    import pdoc
    from markdown_it import MarkdownIt
    from markdown_it.token import Token
    from pygments import highlight
    from pygments.formatters import HtmlFormatter
    from pygments.lexers import get_lexer_by_name
except ModuleNotFoundError as error:
    sys.exit(f"the website needs {error.name}: pip install -e '.[dev]'")

import selfspec

ROOT = Path(__file__).resolve().parent.parent
FRAME = Template((ROOT / "docs" / "website.html").read_text(encoding="utf-8"))
FIRST, CONTENTS, REFERENCE = "README.md", "docs/index.md", "reference/selfspec.html"
# The names of `selfspec` itself, and what a source, a budget or a shape of one's own needs.
MODULES = (
    *("selfspec", "selfspec.draft.sources", "selfspec.draft.shape", "selfspec.cost"),
    *("selfspec.records", "!selfspec.hub"),
)
COLOURS = HtmlFormatter(nowrap=True)


class Page:
    """A page in Markdown, named by its path; `links` are the paths and anchors it leads to."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.headings: dict[str, str] = {}
        self.links: list[tuple[str, str]] = []
        self._markdown = MarkdownIt(options_update={"highlight": in_colours}).enable("table")
        self._tokens = self._markdown.parse((ROOT / name).read_text(encoding="utf-8"))
        for i, token in enumerate(self._tokens):
            if token.type == "heading_open":
                token.attrSet("id", self._new_anchor(self._tokens[i + 1].content))
            for child in token.children or ():
                self._turn(child, {"link_open": "href", "image": "src"}.get(child.type))

    def _new_anchor(self, heading: str) -> str:
        """As GitHub makes it; of several headings with the same words, links find the first."""
        anchor = re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")
        while anchor in self.headings:
            anchor += "-again"
        self.headings[anchor] = heading.replace("`", "")
        return anchor

    def _turn(self, token: Token, attribute: str | None) -> None:
        """Lets a link to a file of the repository lead to its place on the website."""
        target, _, anchor = str(token.attrGet(attribute or "") or ":").partition("#")
        if ":" not in target:
            path = posixpath.join(posixpath.dirname(self.name), target) if target else self.name
            self.links.append((posixpath.normpath(path), anchor))
            token.attrSet(attribute or "", self.address_of(*self.links[-1]))

    def address_of(self, name: str, anchor: str = "") -> str:
        """Where a file of the repository is on the website, as a link of this page."""
        path = posixpath.relpath(on_website(name), posixpath.dirname(self.name) or ".")
        return f"{path}#{anchor}" if anchor else path

    @property
    def title(self) -> str:
        return next(iter(self.headings.values()))

    def html(self, contents: list[tuple[str, str]]) -> str:
        """The whole page, beside links to `contents`: paths with their titles."""
        links = (
            f'<a href="{self.address_of(path)}">{escape(title)}</a>' for path, title in contents
        )
        return FRAME.substitute(
            title=escape(self.title),
            colours=COLOURS.get_style_defs("pre"),
            contents="\n".join(links),
            text=self._markdown.renderer.render(self._tokens, self._markdown.options, {}),
        )


def in_colours(code: str, language: str, _attributes: str) -> str:
    """The HTML of a block of code."""
    return highlight(code, get_lexer_by_name(language or "text"), COLOURS)


def on_website(name: str) -> str:
    """A README and the list of a folder's files are what a browser opens first."""
    if (ROOT / name).is_dir():
        return f"{name}/index.html"
    return re.sub(r"\.md$", ".html", name.replace("README.md", "index.md"))


def pages_from(first: str) -> dict[str, Page]:
    """The pages that can be reached from one of them, which names no missing file or heading."""
    pages: dict[str, Page] = {}
    waiting = [first]
    while waiting:
        name = waiting.pop()
        if name not in pages:
            pages[name] = Page(name)
            waiting += [path for path, _ in pages[name].links if path.endswith(".md")]
    for page in pages.values():
        for path, anchor in page.links:
            exists = not anchor or anchor in pages[path].headings
            if not (ROOT / path).exists() or not exists:
                sys.exit(f"{page.name}: {path}#{anchor} leads nowhere")
    return pages


def write_pages(folder: Path) -> None:
    """The pages, and the files and folders that they lead to."""
    pages = pages_from(FIRST)
    listed = dict.fromkeys([FIRST, CONTENTS, *(path for path, _ in pages[CONTENTS].links)])
    contents = [(name, pages[name].title) for name in listed if name in pages]
    contents.insert(2, (REFERENCE, "Reference of the API"))
    for name, page in pages.items():
        write(folder / on_website(name), page.html(contents))
    for path in {path for page in pages.values() for path, _ in page.links} - pages.keys():
        if (ROOT / path).is_dir():
            without = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / path, folder / path, ignore=without, dirs_exist_ok=True)
            names = sorted(file.name for file in (folder / path).iterdir())
            links = (f'<li><a href="{name}">{name}</a></li>' for name in names)
            write(folder / on_website(path), f"<ul>{''.join(links)}</ul>")
        else:
            write(folder / path, (ROOT / path).read_text(encoding="utf-8"))


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def write_reference(folder: Path) -> None:
    """The pages of the public modules."""
    # Named tuples keep their annotations without the module in which to look them up.
    warnings.filterwarnings("ignore", message="Error parsing type annotation ForwardRef")
    for name in selfspec.__all__:  # imported when first asked for, and pdoc looks without asking
        setattr(selfspec, name, getattr(selfspec, name))
    pdoc.render.configure(docformat="google", show_source=False)
    pdoc.pdoc(*MODULES, output_directory=folder)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python docs/website.py FOLDER")
    warnings.simplefilter("error")
    website = Path(sys.argv[1])
    write_pages(website)
    write_reference((website / REFERENCE).parent)
