"""Folders as users have them, which no writer may change."""

import os
from collections.abc import Callable
from pathlib import Path

from torch import nn

import slimbayes as sb

OURS = {"posterior.safetensors", "config.json", "manifest.json"}


def small_net(scale: float = 0.1) -> nn.Module:
    return sb.bayesianize(nn.Linear(4, 3), sb.Rank1(scale_init=scale))


def write(folder: Path, **texts: str) -> None:
    """Write files whose names are given with __ for a slash and _ for a dot."""
    for name, text in texts.items():
        file = folder / name.replace("__", "/").replace("_", ".")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


def npm_package(path: Path) -> None:
    write(path, package_json='{"name": "mine"}', index_js="let a", lib__a_js="1")
    write(path, node__modules__b__index_js="module.exports = 1")


def git_checkout(path: Path) -> None:
    write(path, README_md="mine", main_py="print()")
    write(path / ".git", HEAD="ref: refs/heads/main", config="[core]", objects__a="1")


def web_app(path: Path) -> None:
    write(path, manifest_json='{"name": "my app"}', index_html="<p>", src__main_js="1")


def web_app_with_a_format(path: Path) -> None:
    text = '{"format": 1, "sha256": {}, "name": "mine"}'
    write(path, manifest_json=text, index_html="<p>")


def browser_extension(path: Path) -> None:
    write(path, manifest_json='{"manifest_version": 3}', background_js="1")


def manifest_that_is_a_list(path: Path) -> None:
    write(path, manifest_json='["index.html"]', index_html="<p>")


def manifest_that_is_no_json(path: Path) -> None:
    write(path, manifest_json="not json", index_html="<p>")


def manifest_alone(path: Path) -> None:
    write(path, manifest_json='{"name": "my app"}')


def manifest_that_is_a_folder(path: Path) -> None:
    write(path, manifest_json__a_txt="mine")


def thesis(path: Path) -> None:
    write(path, chapter1_tex="mine", figures__a_svg="<svg/>")


def hidden_files_alone(path: Path) -> None:
    write(path / ".config", a_toml="mine")
    (path / ".env").write_text("mine")


def nested_folders(path: Path) -> None:
    write(path, a__b__c__d_txt="mine")


def empty_folder_inside(path: Path) -> None:
    (path / "empty").mkdir(parents=True)


def folder_of_another_library(path: Path) -> None:
    write(path, config_json='{"model_type": "bert"}', model_safetensors="mine")


def names_of_a_run(path: Path) -> None:
    write(path, config_yaml="mine: 1", metrics_csv="a,b", record_json="{}")
    write(path, checkpoints__step_txt="mine", data_json="{}", log_txt="mine")
    write(path, environment_json="{}", SHA256SUMS="mine", model__a_txt="mine")


def names_of_a_table(path: Path) -> None:
    write(path, table_md="mine", table_json="{}", page_html="<p>")
    write(path, diagnostics__a_json="{}")


def file_instead(path: Path) -> None:
    path.write_text("mine")


def file_on_the_way(path: Path) -> None:
    path.parent.rmdir()
    path.parent.write_text("mine")


def fifo_inside(path: Path) -> None:
    write(path, notes_txt="mine")
    os.mkfifo(path / "pipe")


def fifo_instead(path: Path) -> None:
    os.mkfifo(path)


def fifo_as_manifest(path: Path) -> None:
    write(path, notes_txt="mine")
    os.mkfifo(path / "manifest.json")


def read_only(path: Path) -> None:
    write(path, notes_txt="mine")
    path.chmod(0o555)


def link_to_a_package(path: Path) -> None:
    npm_package(path.parent / "package")
    path.symlink_to("package")


def link_to_a_file(path: Path) -> None:
    (path.parent / "file").write_text("mine")
    path.symlink_to("file")


def ring_of_links(path: Path) -> None:
    path.symlink_to("other")
    (path.parent / "other").symlink_to(path.name)


def posterior_and_notes(path: Path) -> None:
    sb.save(small_net(), path)
    (path / "NOTES.md").write_text("mine")


def posterior_and_hidden_file(path: Path) -> None:
    sb.save(small_net(), path)
    (path / ".gitattributes").write_text("mine")


def posterior_and_logs(path: Path) -> None:
    sb.save(small_net(), path)
    write(path, logs__a_txt="mine")


def posterior_and_optimizer(path: Path) -> None:
    sb.save(small_net(), path)
    (path / "optimizer.pt").write_bytes(b"mine")


def posterior_of_links(path: Path) -> None:
    """As a cache of the Hub keeps them."""
    sb.save(small_net(), path)
    for name in OURS:
        (path / name).rename(path.parent / f"blob-{name}")
        (path / name).symlink_to(f"../blob-{name}")


def posterior_and_a_folder_named_as_a_draft(path: Path) -> None:
    sb.save(small_net(), path)
    write(path / f".config.json.slimbayes-{'0' * 64}", a_txt="mine")


REFUSED: list[Callable[[Path], None]] = [
    npm_package, git_checkout, web_app, web_app_with_a_format, browser_extension, manifest_that_is_a_list,
    manifest_that_is_no_json, manifest_alone, manifest_that_is_a_folder, thesis, hidden_files_alone, nested_folders,
    empty_folder_inside, folder_of_another_library, names_of_a_run, names_of_a_table, file_instead, file_on_the_way,
    fifo_inside, fifo_instead, fifo_as_manifest, read_only, link_to_a_package, link_to_a_file, ring_of_links,
    posterior_and_notes, posterior_and_hidden_file, posterior_and_logs, posterior_and_optimizer, posterior_of_links,
    posterior_and_a_folder_named_as_a_draft,
]  # fmt: skip


# --- beside a path that is free, or holds a posterior ---


def backup_beside(path: Path) -> None:
    write(path.parent / f"{path.name}.previous", README_md="mine", data_csv="mine")


def posterior_and_backup(path: Path) -> None:
    sb.save(small_net(), path)
    backup_beside(path)


def backup_that_is_a_posterior(path: Path) -> None:
    sb.save(small_net(), path)
    posterior_and_notes(path.parent / f"{path.name}.previous")


def folders_named_as_drafts(path: Path) -> None:
    for name in (f"{path.name}.draft", f".{path.name}.draft-00000000-1-00000000"):
        write(path.parent / name, a_txt="mine")
    write(path.parent / f".{path.name}.slimbayes-00000000-1-00000000", a_txt="mine")
    write(path.parent / ".step-00000001.abcdefgh", a_txt="mine")


def link_to_a_posterior(path: Path) -> None:
    sb.save(small_net(), path.parent / "real")
    write(path.parent, notes_md="mine")
    path.symlink_to("real")


def link_to_an_empty_folder(path: Path) -> None:
    (path.parent / "real").mkdir()
    path.symlink_to("real")


def link_to_nothing(path: Path) -> None:
    path.symlink_to("not-yet")


TAKEN: list[Callable[[Path], None]] = [
    backup_beside, posterior_and_backup, backup_that_is_a_posterior, folders_named_as_drafts, link_to_a_posterior,
    link_to_an_empty_folder, link_to_nothing,
]  # fmt: skip


def contents(place: Path) -> dict[str, object]:
    """Everything below a folder but the files of a posterior alone: what it holds, or what it is."""
    found: dict[str, object] = {}
    for path in sorted(place.rglob("*")):
        name = str(path.relative_to(place))
        if path.is_symlink():
            found[name] = ("link", os.readlink(path))
        elif path.is_file() and not _is_ours(path):
            found[name] = path.read_bytes()
        elif not path.is_file():
            found[name] = "folder" if path.is_dir() else "pipe"
    return found


def _is_ours(file: Path) -> bool:
    manifest = file.parent / "manifest.json"
    return file.name in OURS and (
        manifest.is_file() and '"library": "slimbayes"' in manifest.read_text()
    )
