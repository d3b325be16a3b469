"""save replaces only what it wrote, and at every moment the old or the new state is there."""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forks
import pytest
import torch
from torch import nn
from users_folders import OURS, REFUSED, TAKEN, contents, npm_package, small_net

import slimbayes as sb

# --- folders of users ---


@pytest.mark.parametrize("layout", REFUSED)
def test_a_folder_with_anything_of_the_user_s_is_refused_and_stays_as_it_was(
    layout: Callable[[Path], None], tmp_path: Path
) -> None:
    path = tmp_path / "work" / "p"
    path.parent.mkdir()
    layout(path)
    before = contents(tmp_path)
    with pytest.raises(sb.CheckpointError, match="hoose another path"):
        sb.save(small_net(), path)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("layout", TAKEN)
def test_what_lies_beside_a_posterior_stays_and_links_stay_links(
    layout: Callable[[Path], None], tmp_path: Path
) -> None:
    path = tmp_path / "p"
    layout(path)
    before = contents(tmp_path)
    was_link = path.is_symlink()
    for scale in (0.1, 0.2, 0.3):
        net = small_net(scale)
        sb.save(net, path)
        assert same(loaded(path), net)
    after = contents(tmp_path)
    assert {name: after[name] for name in before} == before
    assert {p.name for p in path.iterdir()} == OURS and path.is_symlink() == was_link


def test_a_refusal_says_what_is_in_the_way(tmp_path: Path) -> None:
    npm_package(tmp_path / "p")
    with pytest.raises(
        sb.CheckpointError,
        match=r"p was not written by slimbayes, so it is not replaced: it holds index\.js, .* such as .*/p/posterior",
    ):
        sb.save(small_net(), tmp_path / "p")
    sb.save(small_net(), tmp_path / "p" / "posterior")
    (tmp_path / "p" / "posterior" / "notes.txt").write_text("mine")
    with pytest.raises(
        sb.CheckpointError, match=r"it holds notes\.txt, .* Move that elsewhere"
    ):
        sb.save(small_net(), tmp_path / "p" / "posterior")


def test_a_posterior_whose_file_was_removed_can_be_saved_again(tmp_path: Path) -> None:
    path = sb.save(small_net(), tmp_path / "p")
    (path / "config.json").unlink()
    net = small_net(0.3)
    sb.save(net, path)
    assert same(loaded(path), net)


# --- failures and kills ---

EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.scandir"}


def loaded(path: Path) -> nn.Module:
    return sb.load(nn.Linear(4, 3), path, check_base="structure")


def same(one: nn.Module, other: nn.Module) -> bool:
    mine, theirs = (
        {n: t for n, t in net.state_dict().items() if "posterior" in n}
        for net in (one, other)
    )
    return mine.keys() == theirs.keys() and all(
        torch.equal(mine[name], theirs[name]) for name in mine
    )


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail() -> None:
    raise OSError(5, "Input/output error")


def strike_at(number: int, strike: Callable[[], None], place: Path) -> list[int]:
    """Strike this process at its n-th access to a file in a folder, half-written file, or fsync.

    Returns: the numbers of the accesses so far, to which others are added.
    """
    calls: list[int] = []

    def count() -> None:
        calls.append(len(calls) + 1)
        if calls[-1] == number:
            strike()

    def audited(event: str, arguments: Any) -> None:
        if event in EVENTS and str(arguments[0]).startswith(str(place)):
            count()

    def write_bytes(self: Path, data: bytes) -> None:
        with open(self, "wb") as file:
            file.write(data[: len(data) // 2])
            file.flush()
            count()
            file.write(data[len(data) // 2 :])

    def fsync(handle: int, sync: Callable[[int], None] = os.fsync) -> None:
        count()
        sync(handle)
        count()

    Path.write_bytes = write_bytes  # type: ignore[method-assign,assignment]
    os.fsync = fsync  # type: ignore[assignment]
    sys.addaudithook(audited)
    return calls


def save_in_a_fork(net: nn.Module, path: Path, base: bool, strike: Any) -> int:
    """0 if it was saved unhurt, 1 if that failed with an OSError, 2 if it was saved all the same, -9 if killed."""
    process = os.fork()
    if not process:
        code = 3
        try:
            calls = strike_at(*strike, path.parent)
            sb.save(net, path, base=base)
            code = 0 if len(calls) < strike[0] else 2
        except OSError:
            code = 1
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


@pytest.mark.parametrize("strike", [kill, fail])
@pytest.mark.parametrize("bases", [(True, False), (False, True)])
def test_a_save_that_fails_or_is_killed_anywhere_leaves_the_old_or_the_new_state(
    strike: Callable[[], None], bases: tuple[bool, bool], tmp_path: Path
) -> None:
    old, new = small_net(0.1), small_net(0.3)
    path, seen = tmp_path / "p", set()
    expected = {kill: -signal.SIGKILL, fail: 1}[strike]
    for number in range(1, 200):
        sb.save(old, path, base=bases[0])
        code = save_in_a_fork(new, path, bases[1], (number, strike))
        assert code in (0, 2, expected), number
        found = loaded(path)
        is_new = same(found, new)
        assert is_new or same(found, old), number
        seen.add(is_new)
        assert is_new or code not in (0, 2), number
        if strike is fail and not is_new:
            names = OURS | ({"base.safetensors"} if bases[0] else set())
            assert {p.name for p in path.iterdir()} == names, number
        sb.save(new, path)
        assert {p.name for p in path.iterdir()} == OURS, number
        if code == 0:
            break
    assert code == 0 and number > 30 and seen == {True, False}
    assert [p.name for p in tmp_path.iterdir()] == ["p"]


@pytest.mark.parametrize("strike", [kill, fail])
def test_a_first_save_that_fails_or_is_killed_leaves_all_or_nothing_to_load(
    strike: Callable[[], None], tmp_path: Path
) -> None:
    new = small_net()
    for number in range(1, 200):
        path = tmp_path / str(number) / "p"
        code = save_in_a_fork(new, path, True, (number, strike))
        try:
            assert same(loaded(path), new)
        except sb.CheckpointError:
            left = list(path.iterdir()) if path.exists() else []
            assert code != 0 and (strike is kill or not left), number
        sb.save(new, path)
        assert {p.name for p in path.iterdir()} == OURS, number
        if code == 0:
            break
    assert code == 0 and number > 20


def test_a_part_of_a_draft_is_never_taken_for_the_file(tmp_path: Path) -> None:
    """A killed save of the same contents leaves a draft under the name of whole contents."""
    net = small_net()
    path = sb.save(net, tmp_path / "p")
    for number in range(1, 30):
        save_in_a_fork(net, path, False, (number, kill))
        assert same(loaded(path), net)


# --- several at once ---

SCALES = (0.1, 0.2, 0.3)


def save_often(path: Path, net: nn.Module, base: bool) -> None:
    for _ in range(25):
        sb.save(net, path, base=base)


def load_often(path: Path, nets: list[nn.Module], over: Path) -> None:
    while not over.exists():
        found = loaded(path)
        assert any(same(found, net) for net in nets)


def test_writers_wait_for_one_another_and_readers_see_no_damage(tmp_path: Path) -> None:
    nets, path = [small_net(scale) for scale in SCALES], tmp_path / "p"
    sb.save(nets[0], path)
    readers = [
        forks.start(load_often, path, nets, tmp_path / "over", log=tmp_path / "log")
        for _ in range(2)
    ]
    writers = [
        forks.start(save_often, path, net, number == 1)
        for number, net in enumerate(nets)
    ]
    assert forks.exit_codes(writers, 60) == [0, 0, 0]
    (tmp_path / "over").touch()
    assert forks.exit_codes(readers, 60) == [0, 0], (tmp_path / "log").read_text()
    assert {p.name for p in path.iterdir()} - {"base.safetensors"} == OURS


def test_first_saves_to_one_path_wait_for_one_another(tmp_path: Path) -> None:
    nets = [small_net(scale) for scale in SCALES]
    for number in range(5):
        path = tmp_path / str(number) / "p"
        writers = [forks.start(sb.save, net, path) for net in nets]
        assert forks.exit_codes(writers, 60) == [0, 0, 0]
        assert any(same(loaded(path), net) for net in nets)
