"""What the hub of pretrained models has, asked with one short try, its refusals in one line."""

import platform
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from hetero.errors import ConfigError
from hetero.folders import one_line
from hetero.tiny import TINY

# Models that `python -m hetero.models fetch NAME` can get without the hub, by their hub id.
FETCHABLE = {"HuggingFaceTB/SmolLM2-135M-Instruct": "smollm2_135m"}
_HUB_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,95}(/[A-Za-z0-9_][A-Za-z0-9._-]{0,95})?")
_REVISION = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._/-]{0,127}")
_HUB_TIMEOUT_S = 3.0  # a wrong configuration has to end in under 5 seconds


def check_hub_id(path: str, revision: str | None) -> None:
    """Without `--`, which keeps `flat_name` unambiguous, and without `..`; the hub allows neither."""
    if not _HUB_ID.fullmatch(path) or "--" in path or ".." in path:
        raise ConfigError(
            f"model.path must be '{TINY}', an existing folder with config.json, or a hub id like ORG/NAME, got {path!r}"
        )
    if revision is not None and (not _REVISION.fullmatch(revision) or ".." in revision):
        raise ConfigError(f"model.revision must be a branch, a tag or a commit of the hub, got {revision!r}")


def snapshot(path: str, revision: str | None) -> Path | None:
    """The folder of the hub's own cache that holds the model's config.json."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(path, "config.json", revision=revision)
    return Path(found).parent if isinstance(found, str) else None


def commit_of(folder: Path) -> str | None:
    """The commit whose files a folder of the hub's cache holds; None for other folders."""
    if folder.parent.name == "snapshots" and folder.parent.parent.name.startswith("models--"):
        return folder.name
    return None


def download_about(path: str, revision: str | None, names: Sequence[str]) -> Path:
    """Downloads small files about a model; gives the folder of its commit in the hub's cache."""
    from huggingface_hub import hf_hub_download

    folder = None
    with refusals_in_one_line(path, revision):
        for name in names:
            at = revision if folder is None else folder.name  # all of one commit, though a branch may move meanwhile
            folder = Path(hf_hub_download(path, name, revision=at)).parent
    assert folder is not None
    return folder


def ask(path: str, revision: str | None, names: Sequence[str]) -> str:
    """The first of the files that the hub has and lets this machine read.

    Raises:
        ConfigError: it has none of them, or cannot be asked.
    """
    found = first_of(path, revision, names)
    if found is None:
        raise ConfigError(f"model.path must be a transformers model, but {path!r} has no {names[0]} on the hub")
    return found


def first_of(path: str, revision: str | None, names: Sequence[str]) -> str | None:
    """The first of the files that the hub has and lets this machine read; None: it has none.

    One short try: the downloads of huggingface_hub retry for 23 s before they say that there is no network.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import EntryNotFoundError

    with refusals_in_one_line(path, revision):
        for name in names:
            try:
                get_hf_file_metadata(hf_hub_url(path, name, revision=revision), timeout=_HUB_TIMEOUT_S)
            except EntryNotFoundError:
                continue
            return name
    return None


def has_data_set_answer(path: str) -> bool:
    """Whether the hub says anything about a data set, be it that there is none; one short try."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError

    try:
        get_hf_file_metadata(hf_hub_url(path, "README.md", repo_type="dataset"), timeout=_HUB_TIMEOUT_S)
    except HfHubHTTPError:
        return True
    except (OSError, ValueError):
        return False
    except Exception as exc:  # the HTTP library's own errors: no common base with the above
        return "timeout" not in type(exc).__name__.lower() and "connect" not in type(exc).__name__.lower()
    return True


@contextmanager
def offline() -> Iterator[None]:
    """Lets libraries look into their caches only: without it they try for half a minute to reach a hub that is not."""
    import datasets
    from huggingface_hub import constants

    before = datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE = before


@contextmanager
def refusals_in_one_line(path: str, revision: str | None) -> Iterator[None]:
    """Turn the hub's refusals into one line with a remedy."""
    from huggingface_hub.errors import GatedRepoError, HTTPError, RepositoryNotFoundError, RevisionNotFoundError

    here = platform.node() or "this machine"
    try:
        yield
    except GatedRepoError as exc:
        raise ConfigError(
            f"model.path {path!r} is gated: accept its terms on its hub page, then run `hf auth login` on {here}"
        ) from exc
    except RevisionNotFoundError as exc:
        raise ConfigError(f"model.revision must exist on the hub, but {path!r} has no {revision!r}") from exc
    except RepositoryNotFoundError as exc:
        raise ConfigError(
            f"model.path {path!r} must exist: no folder here has this name, and on the hub it is absent or private; "
            f"check the name, or run `hf auth login` on {here}"
        ) from exc
    except (HTTPError, OSError) as exc:
        remedy = "give a folder with config.json and *.safetensors, or connect this machine"
        if path in FETCHABLE:
            unpinned = "" if revision is None else " and set model.revision=null"
            remedy = f"run `python -m hetero.models fetch {FETCHABLE[path]}`{unpinned}, or {remedy}"
        raise ConfigError(
            f"model.path {path!r} was not found on {here}: not as a folder, in hetero's cache or in the hub's cache, "
            f"and the hub cannot be asked ({one_line(exc)}); {remedy}"
        ) from exc
