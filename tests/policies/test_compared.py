"""Two answers: the same, different, or nobody can say."""

from __future__ import annotations

import pytest

from policies.similarity.answers import compared

ASKED = "What is the answer, and is it the capital of France?"
LONG = "Photosynthesis turns light, water and carbon dioxide into sugar and oxygen in the chloroplasts of green leaves"
OTHER = "Plants use sunlight to make glucose from carbon dioxide taken from air and water taken up by their roots"
UNRELATED = "The treaty was signed by the delegates of nine provinces after long talks about tolls, fishing and borders"


@pytest.mark.parametrize(
    ("one", "other", "cosine", "verdict"),
    [
        ("Paris.", "The capital of France is Paris.", None, "same"),
        ("Paris", "Lyon", 0.5, "different"),
        ("Yes, you can.", "No, you cannot.", 0.97, "different"),
        ("The answer is 42.", "It is 43.", 0.99, "different"),
        ("42", "The answer is 42.", None, "same"),
        ("It takes 3 to 5 working days.", "It takes 2 weeks.", 0.9, "different"),
        ("It is safe.", "It is dangerous.", 0.95, "different"),
        ("Bake it.", "Boil it.", 0.7, "unsure"),
        (LONG, LONG.replace("light, water", "water, light"), None, "same"),
        (LONG, OTHER, 0.95, "same"),
        (LONG, OTHER, 0.8, "unsure"),
        (LONG, OTHER, None, "unsure"),
        (LONG, UNRELATED, 0.1, "different"),
        (LONG + " in 1779", OTHER + " since 1950", 0.95, "different"),
        ("Paris", "Paris and the Seine.", 0.8, "unsure"),
        ("Red", "Red or blue", 0.8, "unsure"),
        ("You can return it.", "You can return it unopened in the shop.", 0.8, "unsure"),
        (
            f"{LONG}. Send it back by card within 14 days or 2 weeks, at a cost of 5 euros.",
            f"{LONG}. Send it back for credit within 30 days or 4 months, at a cost of 9 euros.",
            0.97,
            "different",
        ),
        ("", "something", 0.9, "unsure"),
        ("word " * 3000, "other " * 3000, 0.7, "unsure"),
    ],
)
def test_answers(one: str, other: str, cosine: float | None, verdict: str) -> None:
    assert compared(one, other, ASKED, cosine) == verdict
    assert compared(other, one, ASKED, cosine) == verdict, "in both orders"
