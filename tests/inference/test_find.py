"""The search of a pool: order, memory, continuation after a kill, and what is left out."""

from __future__ import annotations

import csv
import hashlib
import os
import weakref
from collections.abc import Iterable, Iterator
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lopsided.data.listed import Listed
from lopsided.errors import DataError, InputError
from lopsided.inference.find import Question, Result, Row, Search, Shortlist, fused, write_found
from lopsided.inference.neighbours import Known, spread
from lopsided.inference.pool import Pack, Scores, find_images, packs
from lopsided.inference.predict import answers_of
from lopsided.inference.scorer import Scorer
from lopsided.runs.reopen import open_model
from tiny import write_model, write_photos


def row(position: int, p: float = 0.5, near: float | None = None, digest: str | None = None) -> Row:
    return Row(position, f"{position}.png", p, near, digest or str(position))


def made_scores(pack: Pack, seed: int = 0) -> Scores:
    """Scores without images: they depend on the names alone. One in ten images is unreadable."""
    numbers = [int(hashlib.sha256(f"{seed} {path}".encode()).hexdigest()[:8], 16) for path in pack.paths]
    p = np.array([(number % 1000) / 1000 for number in numbers])
    reasons = tuple("broken" if number % 10 == 3 else "" for number in numbers)
    digests = tuple("" if reason else f"{number:x}" for reason, number in zip(reasons, numbers, strict=True))
    return Scores(pack, reasons, digests, np.stack([1 - p, p], axis=1), (p - 0.5) ** 2)


def made_mapper(parts: Iterable[Pack]) -> Iterator[Scores]:
    return map(made_scores, parts)


def names(number: int) -> Any:
    return lambda: (Path(f"pool/{i:07d}.png") for i in range(number))


def search(out: Path, number: int, mapper: Any = made_mapper, known: Any = (), **question: Any) -> Result:
    return Search(Question(1, **question), known).run(names(number), number, out, mapper)


@given(st.lists(st.integers(0, 5), max_size=60), st.integers(1, 8))
def test_a_shortlist_holds_what_sorting_everything_would_give(scores: list[int], most: int) -> None:
    short = Shortlist(most)
    for place, score in enumerate(scores):
        short.offer(float(score), row(place, digest=f"{place % 7} {score}"))
    first: dict[str, int] = {}
    for place, score in enumerate(scores):
        first.setdefault(f"{place % 7} {score}", place)
    expected = sorted(first.values(), key=lambda place: (-scores[place], place))[:most]
    assert [each.position for each in short.rows()] == expected


@pytest.mark.parametrize("by", ["probability", "neighbours", "both"])
def test_the_first_images_are_those_of_the_whole_order(tmp_path: Path, by: Any) -> None:
    result = search(tmp_path / "found.csv", 3000, by=by, top=50)
    scores = [made_scores(pack) for pack in packs(names(3000)())]
    every = {
        str(path): (score.probabilities[i, 1], near[i])
        for score in scores
        if (near := score.nearness) is not None
        for i, path in enumerate(score.pack.paths)
        if not score.reasons[i]
    }
    assert result.images - result.unreadable == len(every)
    if by == "both":
        orders = [sorted(every, key=lambda path, i=i: (-every[path][i], path)) for i in (0, 1)]
        ranks = [{path: rank for rank, path in enumerate(order, start=1)} for order in orders]
        most = Question(1, by, 50).candidates
        total = {path: sum(1 / (60 + min(rank[path], most + 1)) for rank in ranks) for path in every}
        expected = sorted(every, key=lambda path: (-total[path], path))[:50]
    else:
        place = 0 if by == "probability" else 1
        expected = sorted(every, key=lambda path: (-every[path][place], path))[:50]
    assert [each.path for each in result.rows] == expected


@pytest.mark.parametrize("torn", [False, True])
def test_a_search_that_was_killed_ends_with_the_same_bytes(tmp_path: Path, torn: bool) -> None:
    whole, out = tmp_path / "whole.csv", tmp_path / "found.csv"
    write_found(search(whole, 3000, top=20), "dog", whole)
    done: list[int] = []

    def dying(parts: Iterable[Pack]) -> Iterator[Scores]:
        for pack in parts:
            if len(done) == 3:
                raise KeyboardInterrupt
            done.append(pack.number)
            yield made_scores(pack)

    with pytest.raises(KeyboardInterrupt):
        search(out, 3000, dying, top=20)
    journal = tmp_path / "found.csv.journal"
    if torn:
        journal.write_bytes(journal.read_bytes()[:-9])
    asked: list[int] = []

    def watched(parts: Iterable[Pack]) -> Iterator[Scores]:
        for pack in parts:
            asked.append(pack.number)
            yield made_scores(pack)

    result = search(out, 3000, watched, top=20)
    write_found(result, "dog", out)
    assert asked == ([2, 3, 4, 5] if torn else [3, 4, 5])
    assert out.read_bytes() == whole.read_bytes()
    assert out.with_name("found.unreadable.csv").read_bytes() == whole.with_name("whole.unreadable.csv").read_bytes()
    assert result.continued == (1024 if torn else 1536)


def test_a_journal_of_another_search_or_another_pool_is_not_continued(tmp_path: Path) -> None:
    out = tmp_path / "found.csv"
    search(out, 2000, top=20)
    assert search(out, 2000, top=20).continued == 2000
    assert search(out, 2000, top=21).continued == 0
    renamed = Search(Question(1, top=21)).run(lambda: (Path(f"other/{i}") for i in range(2000)), 2000, out, made_mapper)
    assert renamed.continued == 0
    assert all(each.path.startswith("other/") for each in renamed.rows)


def test_a_pool_whose_images_were_replaced_is_searched_again_and_one_that_was_touched_is_not(tmp_path: Path) -> None:
    out, pool = tmp_path / "found.csv", tmp_path / "pool"
    pool.mkdir()
    for number in range(3):
        (pool / f"{number}.png").write_bytes(bytes([number]))

    def by_content(parts: Iterable[Pack]) -> Iterator[Scores]:
        for pack in parts:
            p = np.array([path.read_bytes()[0] / 10 for path in pack.paths])
            digests = tuple(hashlib.sha256(path.read_bytes()).hexdigest() for path in pack.paths)
            yield Scores(pack, ("",) * len(p), digests, np.stack([1 - p, p], axis=1))

    def run() -> Result:
        return Search(Question(1)).run(lambda: iter(sorted(pool.iterdir())), 3, out, by_content)

    assert [Path(each.path).name for each in run().rows] == ["2.png", "1.png", "0.png"]
    os.utime(pool / "0.png", (5, 5))
    assert run().continued == 3
    (pool / "0.png").write_bytes(b"\x09")  # Of the same size, and with the old time.
    os.utime(pool / "0.png", (5, 5))
    result = run()
    assert (result.continued, Path(result.rows[0].path).name) == (0, "0.png")


def test_labelled_images_are_left_out_by_content(tmp_path: Path) -> None:
    every = search(tmp_path / "a.csv", 600, top=600)
    known = {each.digest for each in every.rows[:5]}
    rest = search(tmp_path / "b.csv", 600, known=known, top=600)
    assert [each.path for each in rest.rows] == [each.path for each in every.rows[5:]]
    assert (every.known, rest.known) == (0, 5)


@pytest.mark.slow
def test_of_a_pool_of_a_million_names_only_a_pack_at_a_time_is_held(tmp_path: Path) -> None:
    alive: weakref.WeakSet[Pack] = weakref.WeakSet()
    most = 0

    def flat(parts: Iterable[Pack]) -> Iterator[Scores]:
        nonlocal most
        for pack in parts:
            alive.add(pack)
            most = max(most, len(alive))
            p = np.linspace(0.1, 0.9, len(pack.paths))
            digests = tuple(map(str, range(512 * pack.number, 512 * pack.number + len(p))))
            yield Scores(pack, ("",) * len(p), digests, np.stack([1 - p, p], axis=1))

    few = [Path(f"pool/{i}.png") for i in range(1000)]  # To make a million paths would take most of the time.
    paths = lambda: islice(cycle(few), 1_000_000)  # noqa: E731
    result = Search(Question(1, top=500)).run(paths, 1_000_000, tmp_path / "found.csv", flat)
    assert (result.images, len(result.rows)) == (1_000_000, 500)
    assert most <= 3
    assert len({row.position >> 32 for row in result.rows}) == 500  # The best image of the first 500 packs.
    assert result.journal.path.stat().st_size < 2**20


def test_nothing_readable_is_an_error_and_leaves_no_journal(tmp_path: Path) -> None:
    def broken(parts: Iterable[Pack]) -> Iterator[Scores]:
        for pack in parts:
            num = len(pack.paths)
            yield Scores(pack, ("cut off",) * num, ("",) * num, np.full((num, 2), np.nan))

    with pytest.raises(DataError, match=r"^No image is readable: 3 failed, the first pool/0000000\.png \(cut off\)\.$"):
        search(tmp_path / "found.csv", 3, broken)
    assert list(tmp_path.iterdir()) == []


def test_a_pool_of_labelled_images_alone_is_one_sentence_and_no_empty_page(tmp_path: Path) -> None:
    def labelled(parts: Iterable[Pack]) -> Iterator[Scores]:
        for pack in parts:
            reasons = ("cut off", *[""] * (len(pack.paths) - 1))
            yield Scores(pack, reasons, ("", *["a"] * (len(pack.paths) - 1)), np.full((len(pack.paths), 2), 0.5))

    paths = [Path(f"pool/{i}.png") for i in range(4)]
    with pytest.raises(DataError) as caught:
        Search(Question(1), frozenset({"a"})).run(lambda: iter(paths), 4, tmp_path / "found.csv", labelled)
    assert str(caught.value) == "Each of the 3 images is labelled already: there is nothing to find."
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"by": "luck"}, r"^--by must be one of probability, neighbours, both, got luck\.$"),
        ({"top": 0}, r"^--top must be from 1 to 100,000, got 0\.$"),
        ({"diverse": 1.0}, r"^--diverse must be a weight in \[0, 1\), got 1\.0\. 0 is the plain order\.$"),
    ],
)
def test_an_option_out_of_range_is_refused(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        Question(0, **wrong)


def test_nearness_compares_with_both_sides() -> None:
    known = Known(np.array([[1, 0], [1, 0.1]], np.float32), np.array([[0, 1], [0.1, 1]], np.float32))
    found = known.nearness(np.array([[2, 0], [1, 1], [0, 2]], np.float32))
    assert found[0] > 1
    assert found[1] == pytest.approx(0, abs=1e-6)
    assert found[2] == pytest.approx(-found[0], abs=1e-6)
    alone = Known(np.array([[1, 0]], np.float32), np.empty((0, 2), np.float32))
    np.testing.assert_allclose(alone.nearness(np.array([[5, 0], [0, 1], [1, 1]], np.float32)), [1, 0, 0.5**0.5])


def test_diversity_puts_a_near_copy_behind_another_kind_of_image() -> None:
    features = np.array([[1, 0], [1, 0.01], [-1, 1], [0, -1]], np.float32)
    relevance = np.array([1.0, 0.99, 0.5, 0.1])
    assert spread(features, relevance, 2, 0.0).tolist() == [0, 1]
    assert spread(features, relevance, 2, 0.5).tolist() == [0, 2]
    assert sorted(spread(features, relevance, 9, 0.9).tolist()) == [0, 1, 2, 3]


def test_ranks_of_two_orders_are_combined() -> None:
    a, b, c = row(1), row(2), row(3)
    assert fused([[a, b, c], [b, c]], 3) == [b, a, c]
    assert fused([[a, b]], 3) == [a, b]


def test_packs_give_the_answers_of_predict_and_list_what_is_broken(tmp_path: Path) -> None:
    model = open_model(write_model(tmp_path / "model"), "cpu")
    photos = write_photos(tmp_path / "photos", {"cat": 5, "dog": 4})
    (photos / "cat" / "002.png").write_bytes(b"")
    paths = [*find_images([photos])[1], tmp_path / "gone.png"]
    expected = {path: answer for path, answer, _ in answers_of(Scorer(*model).stream(paths))}
    counts: list[tuple[int, int]] = []
    scorer = Scorer(*model, batch_size=2)
    answers = answers_of(scorer.map(packs(paths, 4), lambda number, done: counts.append((number, done))))
    found = {path: answer for path, answer, _ in answers}
    assert counts == [(0, 2), (0, 4), (1, 2), (1, 4), (2, 2)], "Images are counted inside a pack, too."
    assert list(found) == paths
    for path, answer in found.items():
        if path.name in ("002.png", "gone.png") and not isinstance(answer, np.ndarray):
            assert str(answer) == str(expected[path])
        else:
            np.testing.assert_allclose(answer, expected[path], atol=1e-6)


def test_a_table_of_paths_is_a_pool(tmp_path: Path) -> None:
    photos = write_photos(tmp_path / "photos", {"cat": 3, "dog": 2})
    rows = [["path", "site"], *([path.relative_to(tmp_path).as_posix(), "x"] for path in sorted(photos.rglob("*.png")))]
    with (tmp_path / "pool.csv").open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    number, paths = find_images([tmp_path / "pool.csv"])
    assert (number, list(paths)) == (5, sorted(photos.rglob("*.png")))
    (tmp_path / "far.csv").write_text(f"path\n{photos / 'cat' / '000.png'}\n/etc/x.png\n")
    with pytest.raises(
        DataError, match=r"^paths must stay below the folder of the table, got /etc/x\.png in line 3 of "
    ):
        find_images([tmp_path / "far.csv"])
    assert find_images([tmp_path / "far.csv"], Listed(allow_outside=True))[0] == 2
    (tmp_path / "none.csv").write_text("path\n")
    with pytest.raises(DataError, match=r"^a table must name at least one image, got no rows in .*none\.csv\.$"):
        find_images([tmp_path / "none.csv"])
    (tmp_path / "odd.csv").write_text("file,label\na,b\n")
    told = r"^a table of images must have the column path, got file, label in .* Name another one with --path-column\.$"
    with pytest.raises(DataError, match=told):
        find_images([tmp_path / "odd.csv"])
    assert list(find_images([tmp_path / "odd.csv"], Listed(path_column="file"))[1]) == [tmp_path / "a"]


def test_the_images_of_a_pack_are_counted_while_it_is_scored(tmp_path: Path) -> None:
    photos = write_photos(tmp_path / "photos", {"cat": 4, "dog": 3})
    scorer = Scorer(*open_model(write_model(tmp_path / "model"), "cpu"), batch_size=3)
    counted: list[tuple[int, int]] = []
    list(scorer.map(packs(find_images([photos])[1], size=5), lambda number, done: counted.append((number, done))))
    assert counted == [(0, 3), (0, 5), (1, 2)]
