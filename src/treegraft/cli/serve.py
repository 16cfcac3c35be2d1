"""`treegraft serve search`: servers that others use."""

from __future__ import annotations

import logging
from enum import StrEnum
from typing import Annotated

import typer

from treegraft.core.listener import address_of, listen
from treegraft.core.listener import serve as answer

serve_app = typer.Typer(
    name="serve", help="Run servers for agents.", no_args_is_help=True, rich_markup_mode=None
)


class Kind(StrEnum):
    """Of a search over a corpus."""

    BM25 = "bm25"
    DENSE = "dense"


@serve_app.callback()
def serve() -> None:
    """Serve a corpus to agents."""


@serve_app.command()
def search(
    corpus: Annotated[
        str, typer.Argument(metavar="CORPUS", help='JSONL file of {"id", "contents"} rows.')
    ],
    kind: Annotated[
        Kind, typer.Option(help="Search by words (bm25) or by meaning (dense).")
    ] = Kind.BM25,
    host: Annotated[
        str,
        typer.Option(help="Address to listen on; the default is reachable from this machine only."),
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")
    ] = 8000,
    top_k: Annotated[
        int, typer.Option(min=1, max=1000, help="Passages per request, unless it says otherwise.")
    ] = 3,
    encoder: Annotated[
        str, typer.Option(help="With --kind dense: as tools.search.encoder.")
    ] = "minilm",
    index_dir: Annotated[
        str, typer.Option(help="Folder of the index. Default: beside the corpus.")
    ] = "",
) -> None:
    """Serve a corpus in Search-R1's retrieve protocol, until Ctrl-C.

    Use it in a recipe with tools.search.kind=http tools.search.url=http://127.0.0.1:8000/retrieve
    """
    from treegraft.tools.search.serve import search_app
    from treegraft.tools.search.tool import open_corpus

    # Making an index takes long, and says how far it is.
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    # Before the index is made, which takes long: a port in use is found at once.
    listener = listen(host, port)
    try:
        backend = open_corpus(
            corpus, "dense" if kind is Kind.DENSE else "bm25", encoder=encoder, index_dir=index_dir
        )
    except BaseException:
        listener.close()
        raise
    url = f"{address_of(listener)}retrieve"
    print(f"{len(backend):,} passages of {corpus} at {url} (Ctrl-C ends)", flush=True)
    answer(search_app(backend, default_top_k=top_k, host=host), listener, grace_s=5)
