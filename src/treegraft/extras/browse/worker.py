"""Reads pages in the child processes of `extract`. Run by file path, never imported."""

from __future__ import annotations

import base64
import contextlib
import io
from typing import Any

import trafilatura

from treegraft.extras.browse.passages import choose

MAX_PDF_PAGES = 200


def answer(request: list[Any]) -> dict[str, Any]:
    """Returns title and passages for [content type, charset or None, address, body in base64,
    query, number of passages, their length in characters], or the error that prevents it."""
    kind, charset, url, encoded, query, num, max_chars = request
    try:
        title, text = map(_repaired, _read(kind, charset, url, base64.b64decode(encoded)))
        return {"title": title, "passages": choose(text, query, num, max_chars)}
    except MemoryError:
        return {"error": "reading it needs too much memory"}
    # The readers meet whatever is in the web, and raise any exception.
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:300]}


def _repaired(text: str) -> str:
    """Returns the text with a stand-in for each half of a pair of surrogates, which some charsets
    let a page write and no other part could encode."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _read(kind: str, charset: str | None, url: str, body: bytes) -> tuple[str, str]:
    beginning = body[:1024].lstrip()
    if kind == "application/pdf" or beginning.startswith(b"%PDF-"):
        return _read_pdf(body)
    text = None
    # A charset that Python does not know, or cannot read this with, is left to trafilatura, which
    # guesses by the bytes.
    with contextlib.suppress(LookupError, ValueError):
        text = body.decode(charset, "replace") if charset else None
    if kind in ("text/plain", "text/markdown") or not (kind or beginning.startswith(b"<")):
        return "", body.decode("utf-8", "replace") if text is None else text
    page: Any = body if text is None else text
    found: Any = trafilatura.bare_extraction(
        page, url=url, favor_recall=True, include_comments=False, with_metadata=True
    )
    # Pages without an article still have words.
    words = getattr(found, "text", None) or trafilatura.html2txt(page) or ""
    return str(getattr(found, "title", None) or ""), str(words)


def _read_pdf(body: bytes) -> tuple[str, str]:
    from pypdf import PdfReader  # slow to import, and most pages are no PDFs

    reader = PdfReader(io.BytesIO(body))
    title = str(reader.metadata.title or "") if reader.metadata else ""
    pages = []
    for number in range(min(len(reader.pages), MAX_PDF_PAGES)):
        pages.append(reader.pages[number].extract_text())
    return title, "\n\n".join(pages)
