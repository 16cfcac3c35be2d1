"""`treegraft push`: a checkpoint with its model card to a hub."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from treegraft import DataError, SettingError
from treegraft.parts import Trained, commands, errors, files, plain

if TYPE_CHECKING:
    from huggingface_hub.errors import HfHubHTTPError

CARD, DRAFT = "README.md", Path("model-card.md")


def push(
    run: Annotated[
        Path,
        typer.Argument(
            metavar="RUN_OR_CHECKPOINT",
            help="Checkpoint folder, or run folder for its latest checkpoint.",
        ),
    ],
    repo_id: Annotated[str, typer.Argument(metavar="REPO_ID", help="NAME or OWNER/NAME.")],
    private: Annotated[
        bool, typer.Option("--private", help="Make a new repository private.")
    ] = False,
    revision: Annotated[
        str | None,
        typer.Option(metavar="BRANCH", help="Branch to commit to; created if missing."),
    ] = None,
    licence: Annotated[
        str | None,
        typer.Option("--license", metavar="ID", help="License of the weights, such as apache-2.0."),
    ] = None,
    card: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Model card to upload instead of the one made here."),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Write the card to model-card.md here and list the files; no network."
        ),
    ] = False,
) -> None:
    """Upload a checkpoint and its model card to a hub.

    The optimiser's state, the run's settings as a file and its trees stay here.
    """
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils._validators import validate_repo_id

    from treegraft.extras.hub.card import model_card

    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise SettingError(
            f"command line: '{repo_id}' is not a repository's name; expected NAME or OWNER/NAME of"
            " letters, digits, '-', '_' and '.'",
            code="repository-name-invalid",
        ) from error
    found = Trained.of(run)
    token = _token(dry_run)
    text = _read(card) if card else model_card(found, repo_id, licence=licence)
    uploaded = {CARD: text.encode(), **files_of(found.checkpoint)}
    said = f"Checkpoint of update {found.state.update}"
    if dry_run:
        files.write_atomically(DRAFT, text)
        commands.say(f"{DRAFT}: the card; edit it and upload it with --card {DRAFT}")
    for name, content in uploaded.items():
        size = len(content) if isinstance(content, bytes) else content.stat().st_size
        commands.say(f"  {size:>13,}  {plain(name)}")
    if dry_run:
        commands.say(f"nothing was uploaded; {len(uploaded)} files would go to {repo_id}")
        return
    place = _upload(repo_id, uploaded, said, private=private, revision=revision, token=token)
    commands.say(f"uploaded to {place}")


def files_of(checkpoint: Path) -> dict[str, bytes | Path]:
    """Returns what is uploaded of a checkpoint, by its name in the repository: contents where an
    absolute path was taken out of them, else the file."""
    found: dict[str, bytes | Path] = {}
    for path in sorted(checkpoint.rglob("*")):
        name = path.relative_to(checkpoint)
        is_ours = name.parts[0] == "treegraft" or any(part.startswith(".") for part in name.parts)
        if path.is_file() and not path.is_symlink() and not is_ours and str(name) != CARD:
            found[name.as_posix()] = _without_paths(path)
    return found


def _without_paths(path: Path) -> bytes | Path:
    from treegraft.extras.hub.card import public

    # transformers and peft note where a model came from.
    if not path.name.endswith("config.json"):
        return path
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise errors.CheckpointError(
            f"'{path}' is not JSON ({error}); the checkpoint is damaged", code="checkpoint-no-json"
        ) from error
    noted = {k: v for k, v in data.items() if k.endswith("name_or_path") and isinstance(v, str)}
    changed = {key: public(value) for key, value in noted.items()}
    return path if noted == changed else json.dumps({**data, **changed}, indent=2).encode()


def _read(card: Path) -> str:
    try:
        return card.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"model card '{card}' could not be read: {error}", code="card-unreadable"
        ) from error


def _token(is_dry: bool) -> str | None:
    from huggingface_hub import constants, get_token

    token = get_token()
    if token is None and not is_dry:
        raise SettingError(
            f"there is no token for {constants.ENDPOINT}; set HF_TOKEN, or log in with `hf auth"
            " login`, with a token that may write",
            code="token-missing",
        )
    return token


def _upload(
    repo_id: str,
    uploaded: Mapping[str, bytes | Path],
    message: str,
    *,
    private: bool,
    revision: str | None,
    token: str | None,
) -> str:
    """Returns the address of the repository.

    Raises:
        HubError: the hub refuses, or cannot be reached.
    """
    from huggingface_hub import CommitOperationAdd, HfApi

    api = HfApi(token=token, library_name="treegraft")
    with _told(repo_id, api.endpoint):
        made = api.create_repo(repo_id, private=private, exist_ok=True)
        if revision is not None:
            api.create_branch(made.repo_id, branch=revision, exist_ok=True)
        api.create_commit(
            made.repo_id,
            [CommitOperationAdd(name, content) for name, content in uploaded.items()],
            commit_message=message,
            revision=revision,
        )
    return str(made)


@contextmanager
def _told(repo_id: str, endpoint: str) -> Iterator[None]:
    """Turns what the hub's client raises into one sentence."""
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    try:
        yield
    # Which HTTP library it is built on, and so what a lost network raises, differs by version.
    except Exception as error:
        cause: BaseException = error
        # A large file that fails is a RuntimeError without the reason.
        while isinstance(cause, RuntimeError) and cause.__cause__ is not None:
            cause = cause.__cause__
        if isinstance(cause, OfflineModeIsEnabled):
            raise errors.HubError(
                "the environment sets HF_HUB_OFFLINE; unset it to upload", code="hub-offline"
            ) from error
        if isinstance(cause, HfHubHTTPError):
            raise errors.HubError(_refusal(cause, repo_id, endpoint), code="hub-refused") from error
        first = plain(str(cause).partition("\n")[0], 300)
        raise errors.HubError(
            f"'{repo_id}' could not be uploaded to {endpoint} ({type(cause).__name__}: {first});"
            " check the network and HF_ENDPOINT, and run the same command again",
            code="hub-failed",
        ) from error


def _refusal(error: HfHubHTTPError, repo_id: str, endpoint: str) -> str:
    status, said = error.response.status_code, error.server_message or ""
    advice = {
        401: "the token is not valid; log in again with `hf auth login`",
        403: "the token may not write there; take one with write access, or another owner",
        404: "there is no such repository or branch for this token",
    }.get(status, "try again later" if status >= 500 else "see what it says")
    reason = f": {plain(said, 300)}" if said else ""
    return f"{endpoint} refused '{repo_id}' with status {status}{reason}; {advice}"
