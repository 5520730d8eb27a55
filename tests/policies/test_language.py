"""What the guards and the verifier can read, and what they refuse."""

from __future__ import annotations

import time

import pytest

from policies.similarity.language import is_english


@pytest.mark.parametrize(
    "text",
    [
        "How do I reset my password?", "capital of burkina faso", "kubectl get pods crashloopbackoff", "iphone 15 esim",
        "docker compose up -d", "What does 'Schadenfreude' mean?", "how to pronounce bon appetit", "17 * 24", "c++ "
        "stl map",
        "Who painted Guernica?", "Tour de France winner 2019", "Is Bayern Munich in the Champions League final?",
        "translate good morning into spanish",
        "wat is teh capitol of frnace",
    ],
)  # fmt: skip
def test_english(text: str) -> None:
    assert is_english(text)


FOREIGN = """
Wie kann ich mein Passwort zurücksetzen?
¿Cuánto cuesta el plan profesional?
Comment annuler ma commande ?
como faço para cancelar o pedido
hoe kan ik mijn bestelling annuleren
come posso annullare il mio ordine
jak mogę anulować zamówienie
hur avbokar jag min beställning
nasıl iptal ederim
如何取消订单
注文をキャンセルする方法
как отменить заказ
كيف ألغي طلبي
주문을 취소하려면
quelle est la capitale de la france
mot de passe oublié
Was kostet das?
Que es un virus
"""


@pytest.mark.parametrize("text", FOREIGN.strip().splitlines())
def test_other_languages(text: str) -> None:
    assert not is_english(text)


def test_no_text_takes_long_to_read() -> None:
    began = time.perf_counter()
    for text in ("what is " + "«" * 4000, "„" * 4000, "'a " * 1300):
        is_english(text)
    assert time.perf_counter() - began < 5, "of a few milliseconds"
