"""Upload an export to the Hugging Face hub."""

from pathlib import Path

from megatoken.base.errors import StorageError, import_extra


def push(export: Path, name: str) -> str:
    """Upload a folder, or a file, to the repository `name`; return its address.

    The repository is created if it does not exist. The endpoint and the token are those of
    huggingface_hub: HF_ENDPOINT, HF_TOKEN or `hf auth login`. Raises StorageError.
    """
    hub = import_extra("huggingface_hub", "hf")
    api = hub.HfApi()
    try:
        repository = api.create_repo(name, exist_ok=True)
        if export.is_dir():
            api.upload_folder(repo_id=repository.repo_id, folder_path=export)
        else:
            file = {"path_or_fileobj": export, "path_in_repo": export.name}
            api.upload_file(repo_id=repository.repo_id, **file)
    except Exception as error:  # the hub, its client and the network raise many types
        reason = str(error).strip().partition("\n")[0]
        fix = f"log in by `hf auth login`, then push again; the export is in {export}"
        raise StorageError(f"cannot push: {type(error).__name__}: {reason}", name, fix) from error
    return str(repository)
