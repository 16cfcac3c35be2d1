"""`treegraft serve search`: servers that others use."""

from __future__ import annotations

import logging
from typing import Annotated, Any

import typer

from treegraft import SettingError
from treegraft.parts import commands, listener

serve_app = typer.Typer(
    name="serve",
    help="Run servers for agents.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)


_SETTINGS = tuple(f"tools.search.{one}" for one in ("kind", "top_k", "encoder", "index_dir"))


@serve_app.callback()
def serve() -> None:
    """Serve a corpus to agents."""


@serve_app.command()
def search(
    corpus: Annotated[
        str, typer.Argument(metavar="CORPUS", help='JSONL file of {"id", "contents"} rows.')
    ],
    overrides: commands.Overrides = None,
    host: Annotated[
        str,
        typer.Option(help="Address to listen on; the default is reachable from this machine only."),
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")
    ] = 8000,
) -> None:
    """Serve a corpus in Search-R1's retrieve protocol, until Ctrl-C.

    Search by words (tools.search.kind=bm25) or by meaning (dense), with tools.search.top_k, encoder
    and index_dir as in a recipe. Use it in a recipe with tools.search.kind=http tools.search.url=http://127.0.0.1:8000/retrieve
    """
    from treegraft.extras.search.local import open_corpus
    from treegraft.extras.search.serve import search_app

    base = {"tools": {"use": ["search"], "search": {"kind": "bm25", "corpus": corpus}}}
    tools = commands.settings_alone(overrides or [], "serve search", _SETTINGS, base).tools
    own: Any = tools.search
    if own.kind not in ("bm25", "dense"):
        raise SettingError(
            f"command line: tools.search.kind: got '{own.kind}', expected bm25 or dense, which"
            " search a corpus.",
            code="search-kind-invalid",
        )
    # Making an index needs minutes, and logs how far it is.
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    # Before the index is made, which takes long: a port in use is found at once.
    socket = listener.listen(host, port)
    try:
        backend = open_corpus(corpus, own.kind, encoder=own.encoder, index_dir=own.index_dir)
    except BaseException:
        socket.close()
        raise
    url = f"{listener.address_of(socket)}retrieve"
    print(f"{len(backend):,} passages of {corpus} at {url} (Ctrl-C ends)", flush=True)
    app = search_app(backend, default_top_k=own.top_k, host=host)
    listener.serve(app, socket, grace_s=5)
