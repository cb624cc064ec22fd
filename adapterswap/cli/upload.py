"""Upload an output to the Hub, as `--push-to-hub` says."""

from __future__ import annotations

import os
from pathlib import Path

from adapterswap.core.model.sources import CONFIG
from adapterswap.kit.errors import ArgumentError, NotFoundError, OutputError, reason_of
from adapterswap.kit.files.text import expand, read_json
from adapterswap.kit.hub import HubFailure


def check_repository(repo: str) -> None:
    """Raise `ArgumentError` unless `repo` has the form of a repository's id. Call this before any long work."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils._validators import validate_repo_id

    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise ArgumentError(
            f"`push_to_hub` is {repo!r}, which is not the id of a repository: {reason_of(error)}",
            "Pass org/name; use `revision` for a branch",
            parameter="push_to_hub",
        ) from None


def check_public_base(base: object, refused: str) -> None:
    """Refuse an adapter that names its base by a path of this machine, from which nobody else can load it.

    Args:
        base: what the adapter's config has, or will have, as its base.
        refused: how the message begins.
    """
    if isinstance(base, str) and (os.path.isabs(base) or os.path.exists(base)):
        raise OutputError(
            f"{refused}: its {CONFIG} names the base by a path of this machine, {base}",
            "Compose it with `base_model=org/name`, or correct `base_model_name_or_path` in that file; then upload the "
            "folder with `hf upload`",
            parameter="push_to_hub",
        )


def publish(
    folder: str | Path,
    repo: str,
    *,
    private: bool | None = None,
    revision: str | None = None,
    commit_message: str | None = None,
) -> str:
    """Upload a folder to a repository on the Hub, which is created if it does not exist.

    Args:
        folder: the folder to upload. Files of the same names in the repository are replaced, others stay.
        repo: the repository's id, such as `org/name`.
        private: True uploads only to a private repository; False creates a public one if there is none. By default a
            new repository is private, and an existing one stays as it is.
        revision: the branch to commit to, which is created if it does not exist; by default the main branch.
        commit_message: the commit message; the default names adapterswap.

    Returns:
        The commit's URL.
    """
    from huggingface_hub import HfApi

    check_repository(repo)
    if not os.path.isdir(path := expand(folder)):
        raise NotFoundError(f"{folder} is not a folder", "Pass the folder to upload", parameter="folder")
    if os.path.exists(path / CONFIG):
        base = read_json(path / CONFIG).get("base_model_name_or_path")
        check_public_base(base, f"{folder} was written but not uploaded")
    message = commit_message or "Upload a folder written by adapterswap"
    try:
        api = HfApi()
        api.create_repo(repo, private=private is not False, exist_ok=True)
        public = private is True and not api.repo_info(repo).private
        if not public:
            if revision is not None:
                api.create_branch(repo, branch=revision, exist_ok=True)
            commit = api.upload_folder(repo_id=repo, folder_path=path, commit_message=message, revision=revision)
            return str(commit)
    except Exception as error:  # the Hub's client, its transports and its storage each have errors of their own
        failure = HubFailure(error)
        online = "Check the network, log in with `hf auth login`, then upload it with `hf upload`"
        raise OutputError(
            f"{folder} was written, but could not be uploaded to {repo}: {failure.reason}",
            failure.remedy(
                online,
                offline="This process is offline: unset HF_HUB_OFFLINE, then upload it with `hf upload`",
                unreachable=online,
            ),
            parameter="push_to_hub",
        ) from None
    raise OutputError(
        f"{folder} was written but not uploaded: {repo} is public, but `private=True` requires a private repository",
        "Make the repository private in its settings, or choose another one",
        parameter="private",
    )
