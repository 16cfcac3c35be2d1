"""The child process behind `extract`: reads pages, writes their text. Run by file path, never
imported.

A request is one line of JSON (kind, charset, url, size, seconds) and the page's bytes; the answer
is one line of JSON with title and text, or with the reason why there is none. The end of the input
ends the process.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import signal
import sys
from typing import Any

MAX_MEMORY_BYTES = 2 << 30
"""A page may be made so that reading it takes any amount; the limit turns that into an error of
this process alone."""
MAX_PDF_PAGES = 200


def _limit_memory() -> None:
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))


def _read_pdf(body: bytes) -> tuple[str, str]:
    from pypdf import PdfReader

    reader = PdfReader(io.BytesIO(body))
    title = str(reader.metadata.title or "") if reader.metadata else ""
    pages = [
        reader.pages[number].extract_text()
        for number in range(min(len(reader.pages), MAX_PDF_PAGES))
    ]
    return title, "\n\n".join(pages)


def _read_html(body: bytes, charset: str | None, url: str) -> tuple[str, str]:
    import trafilatura

    page: Any = body
    if charset:
        with contextlib.suppress(LookupError):
            page = body.decode(charset, "replace")
    found: Any = trafilatura.bare_extraction(
        page, url=url, favor_recall=True, include_comments=False, with_metadata=True
    )
    title = str(getattr(found, "title", None) or "")
    text = str(getattr(found, "text", None) or "")
    # Pages without an article still have words.
    return title, text or str(trafilatura.html2txt(page) or "")


def _read(request: dict[str, Any], body: bytes) -> tuple[str, str]:
    kind, charset = request["kind"], request["charset"]
    beginning = body[:1024].lstrip()
    if kind == "application/pdf" or beginning.startswith(b"%PDF-"):
        return _read_pdf(body)
    if kind in ("text/plain", "text/markdown") or not (kind or beginning.startswith(b"<")):
        try:
            return "", body.decode(charset or "utf-8", "replace")
        except LookupError:
            return "", body.decode("utf-8", "replace")
    return _read_html(body, charset, request["url"])


def main() -> None:
    """Answers requests until the input ends."""
    logging.disable(logging.CRITICAL)
    _limit_memory()
    import trafilatura  # noqa: F401  (takes seconds, which the first page should not wait for)

    source, sink = sys.stdin.buffer, sys.stdout.buffer
    # What a library prints must not stand among the answers.
    sys.stdout = sys.stderr
    sink.write(b'{"ready": true}\n')
    sink.flush()
    for line in source:
        request = json.loads(line)
        body = source.read(request["size"])
        # The parent kills a late worker; should the parent itself be gone, the unhandled alarm ends
        # this process.
        signal.setitimer(signal.ITIMER_REAL, request["seconds"])
        try:
            title, text = _read(request, body)
            answer = {"title": title, "text": text}
        except MemoryError:
            answer = {"error": "reading it needs too much memory"}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"[:300]}
        signal.setitimer(signal.ITIMER_REAL, 0)
        sink.write(json.dumps(answer).encode() + b"\n")
        sink.flush()


if __name__ == "__main__":
    main()
